"""FusedAdamW in Lightning's own Trainer and Fabric: mixed precision, gradient clipping, FSDP2, sharded checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from cases import values
from distributed import Part, assert_same, join_all, needs_gpus, part, same_bits
from fused_optim import FusedAdamW, FusedMuon, muon_param_groups
from snippets import run_section

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
INT8 = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
MOMENTS = ("exp_avg", "exp_avg_sq")
CLIPPED = 0.5  # below the usual norms
Kind = Callable[..., torch.optim.Optimizer]


def network() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 8))
    with torch.no_grad():
        for i, param in enumerate(layers.parameters()):
            param.copy_(values(tuple(param.shape), torch.float32, "cpu", seed=i) * 0.1)
    return layers


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean() * 100


class Module(lightning.LightningModule):
    def __init__(self, kind: Kind, sharded: bool = False, **options: Any) -> None:
        super().__init__()
        self.net, self.kind, self.sharded, self.options = network(), kind, sharded, options
        self.loaded: dict[str, Part] = {}

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.01, **self.options)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """The inputs depend on the step alone: the loader would start anew after a resume."""
        return loss_of(self.net(values((2, 128), torch.float32, str(self.device), seed=self.global_step)))

    def on_train_start(self) -> None:
        self.loaded = parts(self.net, self.trainer.optimizers[0])


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
    """Moments and steps by parameter name, of any layout; nothing before the first step."""
    state_dict, found = optimizer.state_dict(), {}
    step = state_dict["param_groups"][0].get("step", -1)
    for i, (name, _) in enumerate(model.named_parameters()):
        if states := state_dict["state"].get(i):
            found |= {f"{name}: {moment}": part(states[moment]) for moment in MOMENTS}
            found[f"{name}: step"] = part(torch.as_tensor(float(states.get("step", step))))
    return found


def batches() -> Any:
    return torch.utils.data.DataLoader(values((16, 128), torch.float32, "cpu", seed=9), batch_size=2)


def quiet_trainer(steps: int, on: str = "cpu", **options: Any) -> Any:
    silent = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    return lightning.Trainer(accelerator=on, max_steps=steps, **{"devices": 1, **silent, **options})


# --- mixed precision with gradient clipping -------------------------------------------------------------------------


def fitted(precision: str, kind: Kind, on: str = "cpu", **options: Any) -> list[nn.Parameter]:
    """Parameters after ten clipped steps, two of which a GradScaler skips."""
    chosen: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # itself it takes bf16-mixed on CPUs
        scaler = torch.amp.GradScaler(on, init_scale=2.0**17, growth_interval=3)
        chosen = {"plugins": [lightning.pytorch.plugins.MixedPrecision("16-mixed", on, scaler)]}
    module = Module(kind, **options)
    quiet_trainer(10, on, gradient_clip_val=CLIPPED, **chosen).fit(module, batches())
    if precision == "16-mixed":
        assert scaler.get_scale() < 2.0**17
    return list(module.net.parameters())


def unscaled_by_the_scaler(params: Any, **options: Any) -> FusedAdamW:
    optimizer = FusedAdamW(params, **options)
    optimizer.unscales_gradients = False
    return optimizer


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=needs_gpus(1))])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_clipped_training_equals_adamw(precision: str, on: str) -> None:
    expected = fitted(precision, torch.optim.AdamW, on)
    found = fitted(precision, unscaled_by_the_scaler, on)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 if on == "cpu" else 1e-4)  # a step is of 1e-2


class WithMuon(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = muon_param_groups(self.net, muon=["2.weight"])  # not taken for a head
        optimizer = FusedMuon(groups, lr=0.01, adjust_lr_fn="match_rms_adamw")
        optimizer.unscales_gradients = False
        return optimizer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_muon_trains_clipped(precision: str) -> None:
    module = WithMuon(FusedMuon)
    before = [param.detach().clone() for param in module.net.parameters()]
    trainer = quiet_trainer(10, gradient_clip_val=CLIPPED, precision=precision)
    trainer.fit(module, batches())
    (optimizer,) = trainer.optimizers
    states = [set(optimizer.state[param]) for param in module.net.parameters()]
    assert states == [{"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}] * 2
    assert all(not torch.equal(a, b) for a, b in zip(before, module.net.parameters(), strict=True))


def test_without_the_option_lightning_refuses_to_clip() -> None:
    """As for torch's fused optimizers: the gradients would still be scaled when they are clipped."""
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fitted("bf16-mixed", FusedAdamW)


def test_documented_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_section("integrations.md", "Lightning", data=batches())
    assert names["trainer"].optimizers[0].param_groups[0]["step"] == 4


# --- the optimizer's own clipping through wrappers ------------------------------------------------------------------


class Manual(Module):
    """Clips through the wrapper that ``optimizers()`` gives."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.clip_grad_norm_(CLIPPED)
        optimizer.step()


def test_own_clipping_works_through_lightnings_wrapper() -> None:
    manual = Manual(FusedAdamW)
    quiet_trainer(10).fit(manual, batches())
    for ours, theirs in zip(manual.net.parameters(), fitted("32-true", torch.optim.AdamW), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_form_of_checkpoints_is_chosen_through_a_wrapper() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    _, optimizer = fabric.setup(network(), FusedAdamW(network().parameters()))
    wrapped = optimizer.optimizer
    optimizer.checkpoint_format = "torch"
    assert wrapped.checkpoint_format == "torch" and "foreach" in wrapped.state_dict()["param_groups"][0]


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


@contextmanager
def launched() -> Iterator[None]:
    """As torchrun does, so that Lightning starts no processes."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    with mock.patch.dict(os.environ, environment):
        yield


def fit_sharded(folder: str, kind: Kind, steps: int, resume: str | None = None, **options: Any) -> Module:
    strategy = lightning.pytorch.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module = Module(kind, sharded=True, **options)
    settings = {"devices": 2, "strategy": strategy, "gradient_clip_val": CLIPPED, "default_root_dir": folder}
    trainer = quiet_trainer(steps, distributed.device().type, **settings)
    trainer.fit(module, batches(), ckpt_path=resume)
    module.saved = parts(module.net, trainer.optimizers[0])
    trainer.save_checkpoint(f"{folder}/{steps}")
    return module


def change_optimizers(folder: str) -> list[dict[str, Part]]:
    """AdamW, ours, AdamW: what was saved and what the next one had before its first step; then the parameters."""
    with launched():
        first = fit_sharded(folder, torch.optim.AdamW, 2)
        second = fit_sharded(folder, FusedAdamW, 4, f"{folder}/2", checkpoint_format="torch")
        third = fit_sharded(folder, torch.optim.AdamW, 6, f"{folder}/4")
        straight = fit_sharded(f"{folder}/straight", torch.optim.AdamW, 6)
    both = [{name: part(p) for name, p in module.net.named_parameters()} for module in (third, straight)]
    return [first.saved, second.loaded, second.saved, third.loaded, *both]


@pytest.mark.parametrize("ranks, on", distributed.on_each_device((2,)))
def test_fsdp2_in_the_trainer_with_a_change_of_optimizers_and_back(ranks: int, on: str, tmp_path: Path) -> None:
    results = distributed.run(ranks, change_optimizers, str(tmp_path), on=on, timeout=120)
    first, second, saved, third, detour, straight = (join_all(list(each)) for each in zip(*results, strict=True))
    assert_same(second, first)
    assert_same(third, saved)
    assert (float(second["0.weight: step"]), float(third["0.weight: step"])) == (2.0, 4.0)
    for name, value in detour.items():
        torch.testing.assert_close(value, straight[name], rtol=1e-4, atol=1e-6)


def shard_with_fabric(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def train_with_fabric(folder: str, options: dict[str, Any]) -> list[dict[str, Part]]:
    """Ours saves, a new one loads and goes on; AdamW, clipped by Fabric, for comparison."""
    with launched():
        strategy = lightning.fabric.strategies.ModelParallelStrategy(shard_with_fabric)
        fabric = lightning.Fabric(accelerator=distributed.device().type, devices=2, strategy=strategy)
        fabric.launch()
        found = []
        for kind, chosen in ((FusedAdamW, options), (torch.optim.AdamW, {})):
            model = fabric.setup_module(network())
            optimizer = fabric.setup_optimizers(kind(model.parameters(), lr=0.01, **chosen))
            run_with_fabric(fabric, model, optimizer, range(3))
            fabric.save(f"{folder}/{kind.__name__}", {"model": model, "optimizer": optimizer})
            run_with_fabric(fabric, model, optimizer, range(3, 5))
            found.append({name: part(param) for name, param in model.named_parameters()})
        model = fabric.setup_module(network())
        optimizer = fabric.setup_optimizers(FusedAdamW(model.parameters(), lr=0.5, **options))
        fabric.load(f"{folder}/FusedAdamW", {"model": model, "optimizer": optimizer})
        run_with_fabric(fabric, model, optimizer, range(3, 5))
    return [*found, {name: part(param) for name, param in model.named_parameters()}]


def run_with_fabric(fabric: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        fabric.backward(loss_of(model(values((4, 128), torch.float32, str(fabric.device), seed=step))))
        fabric.clip_gradients(model, optimizer, max_norm=CLIPPED)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("ranks, on", distributed.on_each_device((2,)))
@pytest.mark.parametrize("options", [{}, INT8], ids=["float32", "int8"])
def test_fsdp2_in_fabric(options: dict[str, Any], ranks: int, on: str, tmp_path: Path) -> None:
    results = distributed.run(ranks, train_with_fabric, str(tmp_path), options, on=on, timeout=120)
    ours, theirs, resumed = (join_all(list(each)) for each in zip(*results, strict=True))
    assert_same(resumed, ours)
    if options:
        assert not all(same_bits(ours[name], theirs[name]) for name in ours)
    else:
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)
