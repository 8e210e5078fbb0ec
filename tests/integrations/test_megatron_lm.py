"""Megatron-LM's real DDP, distributed optimizer and checkpoints with FusedAdam, over gloo on the CPU and NCCL on GPUs.

They name CUDA where they make tensors: on the CPU ``cuda_on_cpu`` gives them CPU tensors instead, and is all that is
imitated.
"""

from __future__ import annotations

import multiprocessing
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import distributed
import megatron_cases
from cases import normal
from cuda_on_cpu import cuda_on_cpu
from distributed import assert_same, needs_gpus

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_fsdp")

F32, BF16, F16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
SHAPES = {"first": (37, 129), "bias": (513,), "last": (3, 70, 130)}
LR, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.95), 0.01
CONFIG = {"optimizer": "adam", "lr": LR, "weight_decay": DECAY, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1]}


def aware(moments: torch.dtype, **options: Any) -> dict[str, Any]:
    """``--use-precision-aware-optimizer``."""
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        "store_param_remainders": False,
        **options,
    }


MODES: dict[str, dict[str, Any]] = {
    "main params": {},
    "fp32": aware(F32),
    "bf16": aware(BF16),
    "fp16": aware(F16),
    "fp8": aware(FP8),
    "int8": aware(torch.int8),
    "remainders": aware(F32, store_param_remainders=True),
    "int16 remainders": aware(F32, store_param_remainders=True),
    "fp8 remainders": aware(FP8, store_param_remainders=True),
    "fp16 masters": aware(F32, main_params_dtype=F16),
    "fp16 masters and moments": aware(F16, main_params_dtype=F16, store_param_remainders=True),  # its default
    "bf16 grads": aware(F32, main_grads_dtype=BF16),
    # With FP8 weights Megatron-LM keeps FP32 main parameters itself, and reads and writes the states raw.
    "fp8 with main params": aware(FP8, fp8_recipe="tensorwise"),
}
TOLERANCE = {
    "bf16": 0.01,
    "fp16": 0.01,
    "fp8": 0.15,
    "int8": 0.05,  # a code at the largest of a block is 4 / 127 of it, and errors of steps add up
    "fp8 remainders": 0.15,
    "fp16 masters": 2e-6,
    "fp16 masters and moments": 0.01,
    "bf16 grads": 0.02,
    "fp8 with main params": 0.15,
}  # of moments; others exact


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpus(2))]
ONE_AND_TWO_GPUS = [pytest.param("cuda", ranks, marks=needs_gpus(2)) for ranks in (1, 2)]


def here() -> AbstractContextManager[None]:
    """In which Megatron-LM runs on this rank's device."""
    return cuda_on_cpu() if distributed.device().type == "cpu" else nullcontext()


def initialize_groups() -> None:
    """Megatron-LM's process groups, once in a worker."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


class Run:
    """A model of BF16 parameters in Megatron-LM's DDP, and its optimizer."""

    def __init__(self, mode: str, fresh: bool = False, fp32_params: bool = False, shares: bool = True) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import MegatronModule, TransformerConfig

        from fused_optim.integrations import megatron

        megatron.install(megatron.FusedAdamInt16 if mode == "int16 remainders" else megatron.FusedAdam)
        initialize_groups()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
        self.model = MegatronModule(config)
        for i, (name, shape) in enumerate(SHAPES.items()):
            dtype = F32 if fp32_params and name == "bias" else BF16
            value = (normal(shape, i) * (not fresh)).to(distributed.device(), dtype)
            self.model.register_parameter(name, nn.Parameter(value))
        whole = MODES[mode].get("main_grads_dtype", F32) == F32
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=shares, grad_reduce_in_fp32=whole)
        self.ddp = DistributedDataParallel(config, ddp, self.model)
        options = {**CONFIG, "clip_grad": 0.0, "adam_eps": EPS, **MODES[mode]}
        settings = OptimizerConfig(bf16=True, params_dtype=BF16, use_distributed_optimizer=shares, **options)
        chained = get_megatron_optimizer(settings, [self.ddp])
        (self.optimizer,) = chained.chained_optimizers
        for group in self.inner.param_groups:  # as the scheduler does
            group["weight_decay"] = DECAY * group["wd_mult"]
            group["lr"] = 0.5 if fresh else LR  # not in the config, by which 0.19 finds a checkpoint's groups

    @property
    def inner(self) -> Any:
        return self.optimizer.optimizer

    def train(self, steps: range) -> None:
        for step in steps:
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            grads = gradients(step, dist.get_rank())
            named = self.model.named_parameters()
            sum((param.float() * grads[name].to(param.device)).sum() for name, param in named).backward()
            self.ddp.finish_grad_sync()
            successful, _, _ = self.optimizer.step()
            assert successful

    def value(self, param: Tensor) -> Tensor:
        return param.detach().cpu().clone()

    def contents(self) -> dict[str, Tensor]:
        """Parameters, and masters and moments as Megatron-LM itself gathers them, by name; the latter on rank 0."""
        found = {f"{name} parameter": self.value(param) for name, param in self.model.named_parameters()}
        gathered = self.optimizer.get_parameter_state_dp_zero(use_gloo_comm=True)
        if gathered is None:
            return found
        names = {param: name for name, param in self.model.named_parameters()}
        for number, buffer in enumerate(self.optimizer.buffers):
            (tensors,) = gathered[number].values()
            for param, (start, end, _) in buffer.param_index_map.items():
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    found[f"{names[param]} {key}"] = tensors[key][start:end].view(param.shape).cpu().clone()
        return found


def gradients(step: int, rank: int) -> dict[str, Tensor]:
    return {name: normal(shape, 100 * step + 10 * rank + i).to(BF16) for i, (name, shape) in enumerate(SHAPES.items())}


def trained(mode: str, steps: int, fp32_params: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rank 0 has all of them. And what the inner optimizer was made of."""
    with here():
        run = Run(mode, fp32_params=fp32_params)
        run.train(range(steps))
        found = run.contents()
    facts = {
        "class": type(run.inner).__module__,
        "dtypes": {key: value.dtype for states in run.inner.state.values() for key, value in states.items()},
        "decoupled": run.inner.use_decoupled_grad,
        "sizes": [[tuple(param.shape) for param in group["params"]] for group in run.inner.param_groups],
        "steps": [group["step"] for group in run.inner.param_groups],
    }
    return found, facts


def expected(steps: int, ranks: int, dtype: torch.dtype = F32) -> dict[str, Tensor]:
    """torch.optim.AdamW on FP32 masters and the mean of the ranks' gradients."""
    params = [normal(shape, i).to(BF16).float().requires_grad_() for i, shape in enumerate(SHAPES.values())]
    decayed = [param for param in params if param.dim() > 1]
    groups = [{"params": decayed}, {"params": [params[1]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS)
    for step in range(steps):
        for name, param in zip(SHAPES, params, strict=True):
            param.grad = sum(gradients(step, rank)[name].to(dtype) / ranks for rank in range(ranks)).float()
        optimizer.step()
    found = {}
    for name, param in zip(SHAPES, params, strict=True):
        found[f"{name} param"] = param.detach()
        found |= {f"{name} {key}": optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")}
    return found


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "on, world_size, mode",
    [
        *(("cpu", 2, mode) for mode in MODES if mode != "int16 remainders"),
        *(("cpu", ranks, mode) for ranks in (1, 3) for mode in ("main params", "fp8 remainders")),
        *(pytest.param("cuda", 2, mode, marks=needs_gpus(2)) for mode in MODES if mode != "int16 remainders"),
    ],
)
def test_steps_are_those_of_adamw(mode: str, on: str, world_size: int) -> None:
    """Moments, scaled ones too, and masters, remainders too, come out with their true values."""
    results = distributed.run(world_size, trained, mode, 4, on=on)
    found, facts = results[0]
    assert facts["class"] == "fused_optim.integrations.megatron"
    assert facts["decoupled"] == ("main params" not in mode)
    for key, value in expected(4, world_size, BF16 if mode == "bf16 grads" else F32).items():
        tolerance = TOLERANCE.get(mode, 2e-6)
        if "param" in key:
            assert float((found[key] - value).abs().max()) <= (1e-6 if mode not in TOLERANCE else 0.02), key
            error = (found[f"{key}eter"].float() - found[key]).abs()
            assert bool((error <= (found[key].to(BF16).float() - found[key]).abs()).all()), key  # rounded to nearest
        else:
            assert float((found[key] - value).abs().max()) <= tolerance * float(value.abs().max()), key
    for other, _ in results[1:]:
        assert_same({key: found[key] for key in other if "parameter" in key}, other)


@pytest.mark.parametrize("on", DEVICES)
def test_states_are_kept_in_the_asked_formats_on_slices_of_any_length(on: str) -> None:
    ((_, first), (_, second)) = distributed.run(2, trained, "fp8 remainders", 1, on=on)
    assert first["dtypes"] == {"exp_avg": FP8, "exp_avg_sq": FP8, "master_param": torch.int16}
    assert sorted([first["sizes"], second["sizes"]]) == [
        [[(10916,), (4773,)], [(513,)]],
        [[(16384,)], []],
    ]
    assert first["steps"] == second["steps"] == [1, 1]  # the empty group counts, too


def zero_first_step() -> list[int]:
    with here():
        run = Run("fp32")
        run.ddp.zero_grad_buffer()
        if dist.get_rank() == 0:
            run.model.first.main_grad.fill_(1)
        run.ddp.finish_grad_sync()
        run.optimizer.step()
    return [group["step"] for group in run.inner.param_groups]


def test_a_first_step_counts_where_a_rank_has_only_zero_gradients() -> None:
    assert distributed.run(3, zero_first_step) == [[1, 1]] * 3


@pytest.mark.parametrize("on", DEVICES)
def test_fp32_parameters_have_no_second_master(on: str) -> None:
    ((found, _), _) = distributed.run(2, trained, "fp8", 4, True, on=on)
    assert found["bias parameter"].dtype == F32
    assert torch.equal(found["bias param"], found["bias parameter"])
    moved = (found["bias param"] - normal(SHAPES["bias"], 1)).abs()
    assert 0.03 < float(moved.max()) < 0.05  # four steps of about the learning rate


# --- checkpoints --------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "dp_reshardable": {},
    "fully_reshardable": {"distrib_optim_fully_reshardable_mem_efficient": False},
    "fully_reshardable by gloo": {"distrib_optim_fully_reshardable_mem_efficient": True},
    "dp_zero_gather_scatter": {},
}


def sharded(run: Run, form: str, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": form.split()[0], **FORMS[form]}
    model = run.model.sharded_state_dict()
    return {"model": model, "optimizer": run.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}


def save(mode: str, form: str, path: str) -> None:
    from megatron.core import dist_checkpointing

    multiprocessing.current_process()._config["daemon"] = False  # it starts a process of its own
    with here():
        run = Run(mode)
        run.train(range(3))
        dist_checkpointing.save(sharded(run, form, False), path)


def load(mode: str, form: str, path: str, steps: range) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """In Megatron-LM's order: the template, which allocates states, then the model, then the optimizer."""
    from megatron.core import dist_checkpointing

    with here():
        run = Run(mode, fresh=True)
        loaded = dist_checkpointing.load(sharded(run, form, True), path)
        run.model.load_state_dict(loaded["model"])
        before = run.contents()
        run.optimizer.load_state_dict(loaded["optimizer"])
        after = run.contents()
        assert_same(*[{k: v for k, v in each.items() if "parameter" in k} for each in (after, before)])
        run.train(steps)
        return run.contents(), {"lr": [group["lr"] for group in run.inner.param_groups]}


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize(  # each form, each mode, and those that keep codes in every form
    "mode, form",
    [
        *(("fp8 remainders", form) for form in FORMS),
        *zip(["main params", "bf16", "remainders", "fp8 with main params"], FORMS, strict=True),
    ],
)
def test_checkpoints_continue_bit_for_bit(mode: str, form: str, on: str, tmp_path: Path) -> None:
    path = str(tmp_path)
    distributed.run(2, save, mode, form, path, on=on)
    found, facts = distributed.run(2, load, mode, form, path, range(3, 5), on=on)[0]
    assert facts["lr"] == [LR, LR]
    assert_same(found, distributed.run(2, trained, mode, 5, on=on)[0][0])


def test_int16_remainders_continue_bit_for_bit(tmp_path: Path) -> None:
    """The form in which TransformerEngine's can be loaded; FP32 buffers are refused."""
    mode, path = "int16 remainders", str(tmp_path)
    distributed.run(2, save, mode, "dp_reshardable", path)
    assert torch.int16 in {entry.properties.dtype for entry in _tensors(path)}
    found, _ = distributed.run(2, load, mode, "dp_reshardable", path, range(3, 5))[0]
    assert_same(found, distributed.run(2, trained, mode, 5)[0][0])
    path = str(tmp_path / "gathered")
    (tmp_path / "gathered").mkdir()
    distributed.run(2, save, mode, "fully_reshardable", path)
    with pytest.raises(distributed.RemoteError, match=r"master_param: expected torch.int16, got torch.float32"):
        distributed.run(2, load, mode, "fully_reshardable", path, range(0))


def _tensors(path: str) -> list[Any]:
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.values()
    return [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]


@pytest.mark.parametrize("on, world_size", [("cpu", 1), ("cpu", 3), *ONE_AND_TWO_GPUS])
@pytest.mark.parametrize("mode", ["main params", "remainders", "fp8 remainders"])
def test_checkpoints_reshard(mode: str, on: str, world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path)
    distributed.run(2, save, mode, "fully_reshardable", path, on=on)
    found, _ = distributed.run(world_size, load, mode, "fully_reshardable", path, range(0), on=on)[0]
    wanted = distributed.run(2, trained, mode, 3, on=on)[0][0]
    for key, value in wanted.items():
        coded = "fp8" in mode and "exp_avg" in key  # slices are cut into other blocks, so values are encoded anew
        tolerance = 0.07 * float(value.abs().max()) if coded else 0.0
        assert float((found[key].float() - value.float()).abs().max()) <= tolerance, key


def save_file(mode: str, path: str) -> None:
    with here():
        run = Run(mode)
        run.train(range(3))
        torch.save([run.model.state_dict(), run.optimizer.state_dict()], f"{path}/common{dist.get_rank()}")
        run.optimizer.save_parameter_state(f"{path}/states")


def load_file(mode: str, path: str) -> dict[str, Tensor]:
    with here():
        run = Run(mode, fresh=True)
        model, common = torch.load(f"{path}/common{dist.get_rank()}", weights_only=False)
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(common)
        run.optimizer.load_parameter_state(f"{path}/states")
        run.train(range(3, 5))
        return run.contents()


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("mode", ["main params", "fp8 remainders", "fp8 with main params"])
def test_files_of_the_older_format_continue_bit_for_bit(mode: str, on: str, tmp_path: Path) -> None:
    distributed.run(2, save_file, mode, str(tmp_path), on=on)
    found = distributed.run(2, load_file, mode, str(tmp_path), on=on)[0]
    assert_same(found, distributed.run(2, trained, mode, 5, on=on)[0][0])


def load_legacy(mode: str) -> None:
    with here():
        run = Run(mode)
        run.train(range(1))
        with pytest.raises(RuntimeError, match="legacy format"):
            run.optimizer.load_parameter_state_from_dp_zero({}, update_legacy_format=True)


@pytest.mark.parametrize("mode", ["fp8 remainders", "fp8 with main params"])
def test_the_legacy_loader_is_refused_where_it_would_write_values_as_codes(mode: str) -> None:
    distributed.run(1, load_legacy, mode)


# --- the optimizer that is not distributed, which puts states of its own into the inner one before it loads ----------


def save_replicated(path: str) -> None:
    from megatron.core import dist_checkpointing

    multiprocessing.current_process()._config["daemon"] = False
    with here():
        run = Run("main params", shares=False)
        run.train(range(3))
        model = run.model.sharded_state_dict()
        dist_checkpointing.save({"model": model, "optimizer": run.optimizer.sharded_state_dict(model)}, path)


def train_replicated(path: str | None, steps: range) -> dict[str, Tensor]:
    from megatron.core import dist_checkpointing

    with here():
        run = Run("main params", fresh=path is not None, shares=False)
        if path is not None:
            model = run.model.sharded_state_dict()
            parts = {"model": model, "optimizer": run.optimizer.sharded_state_dict(model, is_loading=True)}
            loaded = dist_checkpointing.load(parts, path)
            run.model.load_state_dict(loaded["model"])
            run.optimizer.load_state_dict(loaded["optimizer"])
        run.train(steps)
        found = {name: param.detach() for name, param in run.model.named_parameters()}
        for i, param in enumerate(run.inner.store.params):
            found |= {f"{i} {key}": run.inner.get_unscaled_state(param, key) for key in ("exp_avg", "exp_avg_sq")}
        return {key: value.cpu().clone() for key, value in found.items()}


@pytest.mark.parametrize("on", DEVICES)
def test_the_optimizer_that_is_not_distributed_continues_bit_for_bit(on: str, tmp_path: Path) -> None:
    distributed.run(2, save_replicated, str(tmp_path), on=on)
    found = distributed.run(2, train_replicated, str(tmp_path), range(3, 5), on=on)
    wanted = distributed.run(2, train_replicated, None, range(5), on=on)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)


# --- FP8 weights: --fp8-param-gather, with TransformerEngine's tensors ------------------------------------------------

FP8_SHAPES = {"first.weight": (256, 128), "last.weight": (128, 256)}
FP8_MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "delayed": ("delayed", {}),
    "tensorwise": ("tensorwise", {}),
    "blockwise": ("blockwise", {}),
    "tensorwise fp8": ("tensorwise", aware(FP8)),
    "delayed with masters": ("delayed", aware(F32)),  # the optimizer is given the FP8 slices themselves
    "delayed with fp16 masters": ("delayed", aware(F32, main_params_dtype=F16)),
}


def transformer_engine_recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    kinds = {"delayed": "DelayedScaling", "tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
    return getattr(recipe, kinds[name])()


class Fp8Run(Run):
    """Two linear layers of TransformerEngine, whose FP8 weights are gathered as such."""

    def __init__(self, mode: str, fresh: bool = False) -> None:
        import transformer_engine.pytorch as te
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import MegatronModule, TransformerConfig

        from fused_optim.integrations import megatron

        megatron.install()
        initialize_groups()
        recipe, options = FP8_MODES[mode]
        config = TransformerConfig(num_layers=1, hidden_size=128, num_attention_heads=1, bf16=True)
        self.model = MegatronModule(config)
        made = te.quantized_model_init(recipe=transformer_engine_recipe(recipe), preserve_high_precision_init_val=True)
        with made:
            for i, (name, (rows, columns)) in enumerate(FP8_SHAPES.items()):
                value = normal((rows, columns), i) * (not fresh)
                layer = te.Linear(
                    columns,
                    rows,
                    bias=False,
                    params_dtype=BF16,
                    device="cuda",
                    init_method=lambda weight, value=value: weight.detach().copy_(value),
                )
                self.model.add_module(name.removesuffix(".weight"), layer)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=True
        )
        self.ddp = DistributedDataParallel(config, ddp, self.model)
        options = {**CONFIG, "clip_grad": 0.0, "adam_eps": EPS, "fp8_recipe": recipe, **options}
        settings = OptimizerConfig(bf16=True, params_dtype=BF16, use_distributed_optimizer=True, **options)
        (self.optimizer,) = get_megatron_optimizer(settings, [self.ddp]).chained_optimizers
        for group in self.inner.param_groups:
            group["weight_decay"] = DECAY * group["wd_mult"]
            group["lr"] = 0.5 if fresh else LR

    def train(self, steps: range) -> None:
        """The gradients are put where the backward pass would put them."""
        for step in steps:
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            for i, param in enumerate(self.model.parameters()):
                grad = fp8_gradient(tuple(param.shape), i, step, dist.get_rank())
                param.main_grad.copy_(grad.to(param.device))
            self.ddp.finish_grad_sync()
            successful, _, _ = self.optimizer.step()
            assert successful

    def value(self, param: Tensor) -> Tensor:
        return param.dequantize(dtype=F32).detach().cpu()


def fp8_gradient(shape: tuple[int, ...], index: int, step: int, rank: int) -> Tensor:
    return normal(shape, 100 * step + 10 * rank + index)


def train_fp8(
    mode: str, steps: range, load: str | None = None, save: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights at first, and all in the end."""
    run = Fp8Run(mode, fresh=load is not None)
    start = {name: run.value(param) for name, param in run.model.named_parameters()}
    rank = dist.get_rank()
    if load is not None:
        run.optimizer.load_state_dict(torch.load(f"{load}/common{rank}", weights_only=False))
        run.optimizer.load_parameter_state(f"{load}/states")
    run.train(steps)
    if save is not None:
        torch.save(run.optimizer.state_dict(), f"{save}/common{rank}")
        run.optimizer.save_parameter_state(f"{save}/states")
    return start, run.contents()


def expected_of_fp8(start: list[Tensor], steps: int, ranks: int) -> dict[str, Tensor]:
    params = [nn.Parameter(value) for value in start]
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS)
    for step in range(steps):
        for i, param in enumerate(params):
            grads = [fp8_gradient(tuple(param.shape), i, step, rank) for rank in range(ranks)]
            param.grad = torch.stack(grads).mean(0)
        optimizer.step()
    found = {f"{name} param": param.detach() for name, param in zip(FP8_SHAPES, params, strict=True)}
    for name, param in zip(FP8_SHAPES, params, strict=True):
        found |= {f"{name} {key}": optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")}
    return found


@pytest.mark.parametrize("on, world_size", ONE_AND_TWO_GPUS)
@pytest.mark.parametrize("mode", FP8_MODES)
def test_fp8_weights_are_those_of_the_masters_and_continue(mode: str, on: str, world_size: int, tmp_path: Path) -> None:
    """Masters and moments are AdamW's, weights their FP8 codes, and a saved run goes on as if it had not stopped."""
    pytest.importorskip("transformer_engine")
    path = str(tmp_path)
    distributed.run(world_size, train_fp8, mode, range(2), None, path, on=on, timeout=120)
    results = distributed.run(world_size, train_fp8, mode, range(4), on=on)
    first, straight = results[0]
    start = [normal(shape, i).to(BF16).float() for i, shape in enumerate(FP8_SHAPES.values())]
    if "masters" in mode:  # which the optimizer makes of the FP8 slices that it is given
        start = list(first.values())
    coarse = {"tensorwise fp8": 0.15, "delayed with fp16 masters": 2e-3}.get(mode, 1e-5)
    for key, value in expected_of_fp8(start, 4, world_size).items():
        # An FP16 master is one unit of 2^-10 off after a small update, and another after the next ones.
        tolerance = coarse if "exp_avg" in key or "fp16 masters" in mode else max(1e-5, 0.1 * coarse)
        assert float((straight[key] - value).abs().max()) <= tolerance * float(value.abs().max()), key
        if "param" in key:
            error = (straight[f"{key}eter"] - straight[key]).norm() / straight[key].norm()
            assert 0 < float(error) < 0.05, key
    for _, other in results[1:]:
        assert_same({key: straight[key] for key in other if "parameter" in key}, other)
    resumed = distributed.run(world_size, train_fp8, mode, range(2, 4), path, on=on)
    assert_same(resumed[0][1], straight)


# --- Megatron-FSDP within Megatron-LM: the model's side needs CUDA, the optimizer's does not -----------------------


def fsdp_optimizer(fresh: bool) -> tuple[nn.ParameterDict, Any]:
    """The real DistributedOptimizer over uneven DTensors."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from fused_optim.integrations import megatron

    megatron.install()
    initialize_groups()
    model = nn.ParameterDict(dict(megatron_cases.named_parameters(BF16, fresh)))
    adam = megatron.FusedAdam(model.values(), lr=LR, master_weights=True, store_param_remainders=True, **FSDP_MOMENTS)
    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(use_megatron_fsdp=True),
        named_parameters=model.items,
        config=SimpleNamespace(num_moe_experts=None),
    )
    config = OptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=True)
    return model, DistributedOptimizer(adam, config, None, None, [chunk], None, None, None, 0, 0)


FSDP_MOMENTS = {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": torch.int8}
FSDP_FORM = {"distrib_optim_sharding_type": "fsdp_dtensor"}


def save_fsdp(path: str) -> None:
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    with here():
        model, optimizer = fsdp_optimizer(fresh=False)
        megatron_cases.train(model, optimizer.optimizer, range(3))
        states = optimizer.sharded_state_dict(metadata=FSDP_FORM)
        dcp.save(preprocess_state_dict_for_uneven_dtensor(states), checkpoint_id=path)


def load_fsdp(path: str) -> tuple[dict[str, Tensor], Any]:
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    with here():
        model, optimizer = fsdp_optimizer(fresh=True)
        states = optimizer.sharded_state_dict(is_loading=True, metadata=FSDP_FORM)
        dcp.load(preprocess_state_dict_for_uneven_dtensor(states), checkpoint_id=path)
        optimizer.load_state_dict(states)
        return megatron_cases.contents(model, optimizer.optimizer), optimizer.optimizer.param_groups[0]["step"]


def trained_fsdp() -> tuple[dict[str, Tensor], Any]:
    with here():
        model, optimizer = fsdp_optimizer(fresh=False)
        megatron_cases.train(model, optimizer.optimizer, range(3))
        return megatron_cases.contents(model, optimizer.optimizer), None


def test_fsdp_dtensor_checkpoints_hold_values_and_reshard(tmp_path: Path) -> None:
    distributed.run(3, save_fsdp, str(tmp_path))
    wanted = megatron_cases.joined(distributed.run(1, trained_fsdp))
    for world_size in (1, 2, 3):
        results = distributed.run(world_size, load_fsdp, str(tmp_path))
        assert_same(megatron_cases.joined(results), wanted)
        assert [step for _, step in results] == [3] * world_size


# --- installation -------------------------------------------------------------------------------------------------


def install_again() -> None:
    import inspect

    from megatron.core import optimizer
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

    from fused_optim.integrations import megatron

    class Mine(megatron.FusedAdam):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

        __init__.__signature__ = inspect.signature(megatron.FusedAdam.__init__)

    methods = [
        distrib_optimizer.DistributedOptimizer._get_main_param_and_optimizer_states,
        OptimizerConfig.__post_init__,
    ]
    first = [inspect.unwrap(method) for method in methods]
    for adam in (megatron.FusedAdamInt16, megatron.FusedAdam, Mine):
        megatron.install(adam)
        assert optimizer.Adam is adam and distrib_optimizer.Adam is adam
        options = {
            "bf16": True,
            "params_dtype": BF16,
            "use_distributed_optimizer": True,
            "store_param_remainders": True,
        }
        config = OptimizerConfig(optimizer="adam", use_precision_aware_optimizer=True, **options)
        assert config.store_param_remainders  # which is taken back where TransformerEngine is older than 2.1
    methods = [
        distrib_optimizer.DistributedOptimizer._get_main_param_and_optimizer_states,
        OptimizerConfig.__post_init__,
    ]
    assert [method.__wrapped__ for method in methods] == first  # wrapped once
    with pytest.raises(TypeError, match="adam: expected a subclass"):
        megatron.install(torch.optim.Adam)
    del distrib_optimizer.DistributedOptimizer.load_parameter_state_from_dp_zero_legacy
    with pytest.raises(RuntimeError, match=r"lacks DistributedOptimizer\.load_parameter_state_from_dp_zero_legacy"):
        megatron.install()
    assert optimizer.Adam is Mine  # nothing has been changed


def test_installation() -> None:
    """In a process of its own, which the last lines spoil."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        pool.apply(install_again)
