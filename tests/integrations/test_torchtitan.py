"""FusedAdamW in torchtitan's own optimizer container, configuration and flat state dicts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import distributed
from distributed import Part, assert_same, join_all, part, same_bits
from foreign_cases import SETTINGS, build, train
from fused_optim import FusedAdam, FusedAdamW, FusedMuon
from fused_optim.state.torch_form import unflattened
from snippets import code_of

optimizers = pytest.importorskip("torchtitan.components.optimizer")
utils = pytest.importorskip("torchtitan.components.optimizer.utils")
checkpoint = pytest.importorskip("torchtitan.components.checkpoint")
integration = pytest.importorskip("fused_optim.integrations.torchtitan")
default_fused_adamw, Container = integration.default_fused_adamw, integration.FusedOptimizersContainer

INT8 = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 3


# --- its flat state dicts -------------------------------------------------------------------------------------------


def named(model: nn.Module) -> list[dict[str, Any]]:
    """One group with names, as its container makes them."""
    names, params = zip(*model.named_parameters(), strict=True)
    return [{"params": list(params), "param_names": list(names), "fused": False, "foreach": False}]


def through_flat(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, load: bool) -> dict[str, Part]:
    """What its container, and ours, does to save and to load, and what the optimizer has then."""
    utils.init_optim_state(optimizer)
    flat = utils.get_flat_optim_state_dict(optimizer)
    if load:
        dcp.load(flat, checkpoint_id=path)
        if isinstance(optimizer, FusedAdamW):
            optimizer.load_state_dict(unflattened(optimizer.store, flat))
        else:
            utils.load_flat_optim_state_dict(optimizer, flat)
    else:
        dcp.save(flat, checkpoint_id=path)
    state_dict = optimizer.state_dict()
    found = {f"{i}: {name}": part(state_dict["state"][i][name]) for i in state_dict["state"] for name in MOMENTS}
    steps = torch.stack([states["step"] for states in state_dict["state"].values()])
    return {**found, "steps": part(steps), "lr": part(torch.tensor(state_dict["param_groups"][0]["lr"]))}


def save_adamw(folder: str) -> dict[str, Part]:
    model = build()
    optimizer = torch.optim.AdamW(named(model), **SETTINGS)
    train(model, optimizer, 0, STEPS)
    return through_flat(model, optimizer, f"{folder}/adamw", load=False)


def detour(folder: str, options: dict[str, Any]) -> list[dict[str, Part]]:
    model = build(seed=7)
    optimizer = FusedAdamW(named(model), lr=0.5, checkpoint_format="torch", **options)
    loaded = through_flat(model, optimizer, f"{folder}/adamw", load=True)
    train(model, optimizer, STEPS, STEPS + 1)
    return [loaded, through_flat(model, optimizer, f"{folder}/ours", load=False)]


def go_back(folder: str) -> dict[str, Part]:
    model = build(seed=8)
    optimizer = torch.optim.AdamW(named(model), lr=0.5)
    return through_flat(model, optimizer, f"{folder}/ours", load=True)


@pytest.mark.parametrize("formats", [{}, INT8], ids=["float32", "int8"])
def test_flat_state_dicts_go_from_adamw_to_ours_and_back(formats: dict[str, Any], tmp_path: Path) -> None:
    saved = join_all(distributed.run(2, save_adamw, str(tmp_path)))
    results = distributed.run(3, detour, str(tmp_path), formats)
    loaded, ended = (join_all([result[i] for result in results]) for i in range(2))
    back = join_all(distributed.run(1, go_back, str(tmp_path)))
    assert loaded["steps"].tolist() == [STEPS] * 6 and back["steps"].tolist() == [STEPS + 1] * 6
    assert_same(back, ended)
    coded = {name for name, value in loaded.items() if not same_bits(value, saved[name])}
    assert coded == ({f"{i}: {name}" for i in (0, 3) for name in MOMENTS} if formats else set())
    for name in coded:
        torch.testing.assert_close(loaded[name], saved[name], rtol=0.02, atol=0.01 * float(saved[name].abs().max()))


# --- the container and its configuration ----------------------------------------------------------------------------

OPTIONS = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": "int8", "master_bits": 24, "seed": 5}


def test_the_default_configuration() -> None:
    """Options of param groups and of the whole optimizer where torchtitan looks for them, as JSON."""
    config = default_fused_adamw(lr=3e-4, **OPTIONS)
    read = json.loads(json.dumps(config.to_dict()))
    (group,) = read["param_groups"]
    theirs = optimizers.default_adamw(lr=3e-4).to_dict()["param_groups"][0]["optimizer_kwargs"]
    expected = {**theirs, "betas": [0.9, 0.95], "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
    assert (group["optimizer_name"], group["pattern"], group["optimizer_kwargs"]) == ("FusedAdamW", ".*", expected)
    assert read["optimizer_factory_kwargs_by_name"] == {"FusedAdamW": {"master_bits": 24, "seed": 5}}
    with pytest.raises(TypeError, match="no options of FusedAdamW: momentum"):
        default_fused_adamw(momentum=0.9)


def test_the_container_builds_what_is_named() -> None:
    """Beside torchtitan's own optimizers; names that nobody knows are refused as by torchtitan."""
    model = build(torch.bfloat16)
    group = optimizers.ParamGroupConfig
    config = Container.Config(
        param_groups=[
            group(pattern="bias", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}),
            group(pattern="odd", optimizer_name="FusedAdam", optimizer_kwargs={"lr": 0.2}),
            group(pattern=".*", optimizer_name="FusedAdamW", optimizer_kwargs={"lr": 0.3, "exp_avg_dtype": "int8"}),
        ],
        optimizer_factory_kwargs_by_name={"FusedAdamW": {"master_bits": 24}},
    )
    container = config.build(model_parts=[model])
    assert isinstance(container, Container)
    assert [type(optimizer) for optimizer in container] == [torch.optim.AdamW, FusedAdam, FusedAdamW]
    names = [optimizer.param_groups[0]["param_names"] for optimizer in container]
    assert names == [[f"{layer}.{name}" for layer in ("first", "second")] for name in ("bias", "odd", "weight")]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    container.step()
    *_, last = container
    assert {state.dtype for state in last.state[model.first.weight].values()} == {torch.int8, torch.float32}
    assert (last.settings.master_bits, last.param_groups[0]["lr"]) == (24, 0.3)
    config.param_groups[0].optimizer_name = "Adadelta"
    with pytest.raises(NotImplementedError, match="Adadelta"):
        config.build(model_parts=[model])


def test_the_container_builds_muon_for_matrices() -> None:
    """By patterns of names, the first that matches; what is no matrix is FusedAdamW's."""
    group = optimizers.ParamGroupConfig
    vectors = group(pattern=r".*(norm|bias|0\.weight).*", optimizer_name="FusedAdamW", optimizer_kwargs={"lr": 1e-3})
    muon = {"lr": 0.02, "momentum_dtype": "int8", "adjust_lr_fn": "match_rms_adamw"}
    matrices = group(pattern=r".*", optimizer_name="FusedMuon", optimizer_kwargs=muon)
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 64, bias=False), nn.Linear(64, 16))
    container = Container.Config(param_groups=[vectors, matrices]).build(model_parts=[model])
    kinds = {type(each): each for each in container.optimizers}
    assert set(kinds) == {FusedAdamW, FusedMuon}
    assert set(kinds[FusedMuon].store.params) == {model[1].weight, model[2].weight}
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randint(16, (4, 8))).square().mean().backward()
        container.step()
        container.zero_grad()
    assert kinds[FusedMuon].state[model[1].weight]["momentum_buffer"].dtype == torch.int8
    assert json.dumps(muon)


def test_its_config_manager_selects_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the user's module on the documentation page; the command line goes on working."""
    pytest.importorskip("triton")  # which torchtitan's models import
    (tmp_path / "my_config.py").write_text(code_of("integrations.md", "torchtitan"))
    monkeypatch.syspath_prepend(tmp_path)
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    config = manager.parse_args(["--module", "my_config", "--config", "llama3_fused", "--training.steps", "3"])
    assert isinstance(config.optimizer, Container.Config) and config.training.steps == 3
    container = config.optimizer.build(model_parts=[build(torch.bfloat16)])
    (optimizer,) = container
    assert isinstance(optimizer, FusedAdamW) and optimizer.param_groups[0]["exp_avg_sq_dtype"] == "int8"
    json.dumps(config.to_dict())


# --- its CheckpointManager ------------------------------------------------------------------------------------------


class Run:
    """A model and what torchtitan's trainer builds around it."""

    def __init__(self, folder: str, config: Any, seed: int = 0, mode: str = "disabled") -> None:
        self.model = build(torch.bfloat16, seed=seed)
        self.optimizers = config.build(model_parts=[self.model])
        schedule = optimizers.LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)
        saving = {"enable": True, "interval": 1, "last_save_model_only": False, "async_mode": mode}
        self.checkpointer = checkpoint.CheckpointManager.Config(**saving).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )
        self.checkpointer.states.pop("dataloader")

    def train(self, first: int, last: int) -> None:
        """As its trainer: gradients are kept, and zeroed."""
        for step in range(first, last):
            for i, param in enumerate(self.model.parameters()):
                grad = distributed.shard_like(_gradient(tuple(param.shape), 100 * step + i), param)
                if param.grad is None:
                    param.grad = grad
                else:
                    param.grad.copy_(grad)
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad(set_to_none=False)

    def everything(self) -> dict[str, Part]:
        found = {name: part(param) for name, param in self.model.named_parameters()}
        for optimizer in self.optimizers:
            names = [name for group in optimizer.param_groups for name in group["param_names"]]
            if getattr(optimizer, "checkpoint_format", None) == "native":
                optimizer.checkpoint_format = "unscaled"
            state_dict = optimizer.state_dict()
            for id_, states in state_dict["state"].items():
                found |= {f"{names[id_]}: {name}": part(torch.as_tensor(value)) for name, value in states.items()}
            found["lr"] = part(torch.tensor(optimizer.param_groups[0]["lr"]))
            found["step"] = part(torch.tensor(int(optimizer.param_groups[0].get("step", -1))))
        return found


def _gradient(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_and_save(folder: str, options: dict[str, Any], mode: str) -> dict[str, Part]:
    run = Run(folder, default_fused_adamw(lr=0.01, **options), mode=mode)
    run.train(0, 3)
    run.checkpointer.save(3)
    run.train(3, 5)
    run.checkpointer.maybe_wait_for_saving()
    run.checkpointer.close()
    return run.everything()


def load_and_go_on(folder: str, options: dict[str, Any]) -> dict[str, Part]:
    run = Run(folder, default_fused_adamw(lr=0.01, **options), seed=7)
    assert run.checkpointer.load(step=3)
    run.train(3, 5)
    run.checkpointer.close()
    return run.everything()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("form", ["unscaled", "native"])
def test_what_two_ranks_save_continues_on_one_and_three(form: str, mode: str, tmp_path: Path) -> None:
    """Bit for bit, through torchtitan's own checkpoints."""
    options = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
    options |= {"checkpoint_format": form}
    straight = join_all(distributed.run(2, run_and_save, str(tmp_path), options, mode))
    for ranks in (1, 3):
        assert_same(join_all(distributed.run(ranks, load_and_go_on, str(tmp_path), options)), straight)


def adamw_run(folder: str, load: int | None, first: int, last: int) -> dict[str, Part]:
    run = Run(folder, optimizers.default_adamw(lr=0.01), seed=0 if load is None else 8)
    if load is not None:
        assert run.checkpointer.load(step=load)
    loaded = run.everything() if load is not None else {}
    run.train(first, last)
    run.checkpointer.save(last)
    run.checkpointer.close()
    return loaded or run.everything()


def fused_run(folder: str) -> list[dict[str, Part]]:
    run = Run(folder, default_fused_adamw(lr=0.01, checkpoint_format="torch", **INT8), seed=7)
    assert run.checkpointer.load(step=3)
    loaded = run.everything()
    run.train(3, 5)
    run.checkpointer.save(5)
    run.checkpointer.close()
    return [loaded, run.everything()]


def test_a_run_changes_from_adamw_and_back_at_its_checkpoints(tmp_path: Path) -> None:
    saved = join_all(distributed.run(2, adamw_run, str(tmp_path), None, 0, 3))
    results = distributed.run(3, fused_run, str(tmp_path))
    loaded, ended = (join_all([result[i] for result in results]) for i in range(2))
    back = join_all(distributed.run(1, adamw_run, str(tmp_path), 5, 5, 6))
    for name in saved:
        if "step" in name:
            continue
        if ": " not in name or "weight" not in name:
            assert torch.equal(loaded[name].float(), saved[name].float()), name
    assert {float(value) for name, value in loaded.items() if ": step" in name} == {3.0}
    assert {float(value) for name, value in back.items() if ": step" in name} == {5.0}
    for name, value in back.items():
        if ": exp_avg" in name:  # AdamW keeps them in the parameters' dtype
            assert same_bits(value, ended[name].bfloat16()), name
