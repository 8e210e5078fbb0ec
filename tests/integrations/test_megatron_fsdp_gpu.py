"""Megatron-FSDP's real model and optimizer wrappers on GPUs, over NCCL, and the example that trains with them.

The modules' losses are linear in their parameters, so that gradients are what a test chooses, for every world size.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import distributed
from cases import normal
from distributed import assert_same, needs_gpus, two_gpus
from fused_optim.sharding.dtensor import local_tensor
from megatron_cases import contents, joined, settings, state_options
from peers import FusedAdam

pytest.importorskip("megatron_fsdp")

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
FORMATS = [F32, BF16, torch.float16, torch.float8_e4m3fn, INT8]
STRATEGIES = ["optim", "optim_grads", "optim_grads_params"]
# On two ranks: shards of 5 and 155 rows, 26 and 38 and, of the other parameters, all and none.
ROOT_SHAPES = {"odd": (7, 64), "one": (1, 64), "narrow": (64, 32), "bias": (7,)}
UNIT_SHAPES = {"up": (160, 64), "up_bias": (160,), "down": (64, 160), "down_bias": (64,)}
# What holds the FP32 weights: Megatron-FSDP's main parameters, or states of FusedAdam.
KINDS: dict[str, tuple[torch.dtype | None, dict[str, Any]]] = {
    "main params": (F32, {}),
    "masters": (None, {}),
    "remainders": (None, {"store_param_remainders": True}),
}
LR, DECAY = 0.01, 0.1


# --- models and optimizers ----------------------------------------------------------------------------------------


class Linear(nn.Module):
    """Adds the inner products of its parameters and their chosen gradients to what it is given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seeds: Iterator[int]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(normal(shape, next(seeds)).to(BF16)))

    def forward(self, total: Tensor, gradients: dict[str, Tensor], prefix: str) -> Tensor:
        return total + sum((p.float() * gradients[prefix + name]).sum() for name, p in self._parameters.items())


class Unit(Linear):
    """What Megatron-FSDP gathers and releases as a whole."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeds = count()
        self.root = Linear(ROOT_SHAPES, seeds)
        self.units = nn.ModuleList(Unit(UNIT_SHAPES, seeds) for _ in range(2))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        total = self.root(torch.zeros((), device=distributed.device()), gradients, "root.")
        for i, unit in enumerate(self.units):
            total = unit(total, gradients, f"units.{i}.")
        return total


def gradients(named: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """BF16 values, which every dtype holds and the mean over ranks does not round."""
    device = distributed.device()
    return {name: normal(p.shape, 100 * (step + 1) + i).to(device, BF16) for i, (name, p) in enumerate(named.items())}


def grouped(named: dict[str, nn.Parameter], **of_biases: Any) -> list[dict[str, Any]]:
    """Three param groups, two with their own settings."""
    return [
        {"params": [p for name, p in named.items() if "bias" not in name and "one" not in name], "weight_decay": 0.3},
        {"params": [p for name, p in named.items() if "bias" in name], "lr": 0.02, "betas": (0.8, 0.9), **of_biases},
        {"params": [p for name, p in named.items() if "one" in name]},
    ]


def package() -> Any:
    """Megatron-FSDP with its own config. Beside megatron-core it takes that one's, and 0.16.1's lacks its options."""
    module = importlib.import_module("megatron_fsdp.fully_shard")
    config = importlib.import_module("megatron_fsdp.distributed_data_parallel_config")
    module.DistributedDataParallelConfig = config.DistributedDataParallelConfig
    return module


def wrapping(strategy: str, kind: str, grads: torch.dtype | None = None, decoupled: bool = False) -> dict[str, Any]:
    """Arguments of ``fully_shard_model`` and ``fully_shard``."""
    from megatron_fsdp import MixedPrecisionPolicy

    return {
        "device_mesh": distributed.mesh(dist.get_world_size(), 1, names=("shard", "tp")),
        "dp_shard_dim": "shard",
        "tp_dim": "tp",
        "fsdp_unit_modules": [Unit],
        "zero_dp_strategy": strategy,
        "mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=KINDS[kind][0], main_grads_dtype=grads),
        "use_decoupled_grad": decoupled,
    }


def new_model(fresh: bool = False) -> Model:
    model = Model().to(distributed.device())
    if fresh:
        for param in model.parameters():
            nn.init.zeros_(param)
    return model


def build(
    strategy: str,
    kind: str,
    options: dict[str, Any],
    fresh: bool = False,
    grads: torch.dtype | None = None,
    first_moments_of_biases: torch.dtype = BF16,
) -> tuple[nn.Module, FusedAdam]:
    mfsdp = package()
    decoupled = options.get("use_decoupled_grad", False)
    model = mfsdp.fully_shard_model(new_model(fresh), **wrapping(strategy, kind, grads, decoupled))
    groups = grouped(dict(model.module.named_parameters()), exp_avg_dtype=first_moments_of_biases)
    optimizer = FusedAdam(
        groups, lr=0.5 if fresh else LR, weight_decay=DECAY, **KINDS[kind][1], **options, decoupled_weight_decay=True
    )
    return model, mfsdp.fully_shard_optimizer(optimizer)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    named = dict(model.module.named_parameters())
    for step in steps:
        model(gradients(named, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_plain(model: nn.Module, optimizer: FusedAdam, steps: int, scale: float) -> None:
    named = dict(model.named_parameters())
    for step in range(steps):
        for name, grad in gradients(named, step).items():
            named[name].grad = grad.to(named[name].dtype) * scale
        optimizer.step()


class Facts:
    """What every rank says of its optimizer, its shards and the weights that the model computes with."""

    def __init__(self, named: nn.Module, optimizer: FusedAdam, model: nn.Module, steps: int) -> None:
        self.settings = settings(optimizer)
        self.rows = {name: local_tensor(param).shape[0] for name, param in named.named_parameters()}
        self.next_loss = model(gradients(dict(named.named_parameters()), steps)).item()

    def check(self, expected: Facts) -> None:
        assert self.settings == expected.settings
        assert self.next_loss == pytest.approx(expected.next_loss, abs=0.05)  # of about 200; a step changes it by 2


def trained(
    strategy: str, kind: str, options: dict[str, Any], steps: int, **others: Any
) -> tuple[dict[str, Tensor], Facts]:
    model, optimizer = build(strategy, kind, options, **others)
    train(model, optimizer, range(steps))
    return contents(model.module, optimizer), Facts(model.module, optimizer, model, steps)


def unsharded(kind: str, options: dict[str, Any], steps: int, scale: float = 1.0) -> tuple[dict[str, Tensor], Facts]:
    """The same steps on plain tensors, without Megatron-FSDP, with gradients times ``scale``."""
    main, masters = KINDS[kind]
    model = new_model().to(main or BF16)
    groups = grouped(dict(model.named_parameters()), exp_avg_dtype=BF16)
    optimizer = FusedAdam(groups, lr=LR, weight_decay=DECAY, **masters, **options, decoupled_weight_decay=True)
    train_plain(model, optimizer, steps, scale)
    return contents(model, optimizer), Facts(model, optimizer, model.to(BF16), steps)


# --- steps --------------------------------------------------------------------------------------------------------


def check_trained(
    results: list[tuple[dict[str, Tensor], Facts]], kind: str, options: dict[str, Any], steps: int
) -> None:
    ((expected, facts),) = distributed.run(1, unsharded, kind, options, steps, on="cuda")
    assert_same(joined(results), expected)
    for _, found in results:
        found.check(facts)


@two_gpus
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharding_does_not_change_bits(strategy: str, kind: str, fmt: torch.dtype) -> None:
    """Uneven and empty shards, three param groups, all formats: parameters, masters and moments of one process."""
    options = state_options(fmt)
    results = distributed.run(2, trained, strategy, kind, options, 20, on="cuda")
    check_trained(results, kind, options, 20)
    rows = [facts.rows for _, facts in results]
    assert [(r["units.0.up"], r["root.narrow"], r["root.one"]) for r in rows] == [(5, 26, 1), (155, 38, 0)]


def trained_by_torch(strategy: str, steps: int) -> tuple[dict[str, Tensor], None]:
    """torch.optim.AdamW under the same wrapper, whose step with zero gradients is taken back by hand."""
    mfsdp = package()
    model = mfsdp.fully_shard_model(new_model(), **wrapping(strategy, "main params"))
    named = dict(model.module.named_parameters())
    optimizer = torch.optim.AdamW(grouped(named), lr=LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    mfsdp.fully_shard_optimizer(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
    train(model, optimizer, range(steps))
    return {f"{name} parameter": local_tensor(param.detach()).cpu() for name, param in named.items()}, None


# Half the distance of two neighbouring values, relative to the value; int8's to the largest of a block, of about three
# times the block's RMS. Errors of moments partly cancel over steps, so the sum of the updates is off by no more.
ROUNDING = {F32: 1e-6, BF16: 2**-9, torch.float16: 2**-12, torch.float8_e4m3fn: 2**-4, INT8: 3 / 254}


@two_gpus
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_are_those_of_adamw_under_the_same_wrapper(strategy: str, fmt: torch.dtype) -> None:
    expected = joined(distributed.run(2, trained_by_torch, strategy, 20, on="cuda"))
    found = joined(distributed.run(2, trained_in, fmt, strategy, 20, on="cuda"))
    errors = torch.cat([(found[key] - value).flatten() for key, value in expected.items()])
    moved = torch.cat([(value - initial(key.split()[0])).flatten() for key, value in expected.items()])
    assert float(errors.norm()) <= ROUNDING[fmt] * float(moved.norm())
    if fmt == F32:  # values of up to 4, and the order of roundings differs
        assert float(errors.abs().max()) <= 2e-6
    assert float(moved.abs().mean()) > 0.02


def trained_in(fmt: torch.dtype, strategy: str, steps: int) -> Any:
    return trained(strategy, "main params", state_options(fmt), steps, first_moments_of_biases=fmt)


def initial(name: str) -> Tensor:
    return dict(Model().named_parameters())[name].detach().float()


# --- hybrid sharding ----------------------------------------------------------------------------------------------


def trained_in_hybrid(
    outer_strategy: str, kind: str, options: dict[str, Any], steps: int
) -> tuple[dict[str, Tensor], float]:
    """Whole tensors, of two replicas or, with sharding by the outer dim, two parts of each rank's shard.

    And what the wrapper multiplies gradients by, a power of two.
    """
    mfsdp, size = package(), dist.get_world_size()
    mesh = distributed.mesh(2, size // 2, 1, names=("outer", "shard", "tp"))
    arguments = {
        **wrapping("optim_grads_params", kind),
        "device_mesh": mesh,
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": dist.group.WORLD,
        "outer_dp_sharding_strategy": outer_strategy,
    }
    model = mfsdp.fully_shard_model(new_model(), **arguments)
    groups = grouped(dict(model.module.named_parameters()), exp_avg_dtype=BF16)
    optimizer = mfsdp.fully_shard_optimizer(
        FusedAdam(groups, lr=LR, weight_decay=DECAY, **KINDS[kind][1], **options, decoupled_weight_decay=True)
    )
    scales: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: scales.append(scale_of_gradients(model.module, len(scales))))
    train(model, optimizer, range(steps))
    assert len(set(scales)) == 1, scales
    params = dict(model.module.named_parameters())
    found = {
        key: whole_of(placed_like(params[key.split()[0]], value)).cpu()
        for key, value in contents(model.module, optimizer).items()
    }
    return found, scales[0]


def scale_of_gradients(model: nn.Module, step: int) -> float:
    """By their norms: of what the optimizer is given, and of what the backward pass computes."""
    named = dict(model.named_parameters())
    local = {
        name: torch.zeros_like(local_tensor(p)) if p.grad is None else local_tensor(p.grad) for name, p in named.items()
    }
    whole = [whole_of(placed_like(param, local[name])) for name, param in named.items()]
    given = sum(float(grad.float().square().sum()) for grad in whole)
    computed = sum(float(grad.float().square().sum()) for grad in gradients(named, step).values())
    ratio = (given / computed) ** 0.5
    scale = 2.0 ** round(math.log2(ratio))
    assert ratio == pytest.approx(scale, rel=1e-3)
    return scale


def whole_of(tensor: DTensor) -> Tensor:
    return importlib.import_module("megatron_fsdp.uneven_dtensor").uneven_dtensor_to_full_tensor(tensor)


def placed_like(param: DTensor, local: Tensor) -> DTensor:
    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(local.to(param.device), param.device_mesh, param.placements, **layout)


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=needs_gpus(ranks)) for ranks in (2, 4)])
@pytest.mark.parametrize("fmt", [F32, INT8], ids=str)
@pytest.mark.parametrize("kind", ["main params", "remainders"])
@pytest.mark.parametrize("outer_strategy", ["no_shard", "optim"])
def test_hybrid_sharding_does_not_change_bits(outer_strategy: str, kind: str, fmt: torch.dtype, ranks: int) -> None:
    """Replicas of a sharded model, and their states sharded once more; against one process.

    Where states are sharded by the outer dim, Megatron-FSDP 0.6.1 does not hand the optimizer the mean of gradients.
    """
    options = state_options(fmt)
    results = distributed.run(ranks, trained_in_hybrid, outer_strategy, kind, options, 5, on="cuda")
    (scale,) = {scale for _, scale in results}
    ((expected, _),) = distributed.run(1, unsharded, kind, options, 5, scale, on="cuda")
    for found, _ in results:
        assert_same(found, expected)


# --- checkpoints --------------------------------------------------------------------------------------------------


def save(strategy: str, kind: str, options: dict[str, Any], path: str) -> None:
    model, optimizer = build(strategy, kind, options)
    train(model, optimizer, range(3))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)


def load(strategy: str, kind: str, options: dict[str, Any], path: str, steps: range) -> Any:
    model, optimizer = build(strategy, kind, options, fresh=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    found = contents(model.module, optimizer)
    train(model, optimizer, steps)
    found |= {f"{key} later": value for key, value in contents(model.module, optimizer).items()}
    return found, Facts(model.module, optimizer, model, steps.stop)


@two_gpus
@pytest.mark.parametrize("form", ["unscaled", "native"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_reshard_and_continue(kind: str, fmt: torch.dtype, form: str, tmp_path: Path) -> None:
    """From two ranks to one, from one to two and to as many, with another strategy: bit for bit."""
    options = {"checkpoint_format": form, **state_options(fmt)}
    ((at_save, _),) = distributed.run(1, unsharded, kind, options, 3, on="cuda")
    ((at_end, facts),) = distributed.run(1, unsharded, kind, options, 5, on="cuda")
    expected = {**at_save, **{f"{key} later": value for key, value in at_end.items()}}
    for saved, loaded in [(2, 1), (1, 2), (2, 2)]:
        path = str(tmp_path / f"{saved}{loaded}")
        distributed.run(saved, save, "optim_grads_params", kind, options, path, on="cuda")
        strategy = "optim_grads" if loaded == 2 else "optim_grads_params"
        results = distributed.run(loaded, load, strategy, kind, options, path, range(3, 5), on="cuda")
        assert_same(joined(results), expected)
        for _, found in results:
            found.check(facts)


# --- the example --------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 30


def losses(tmp_path: Path, ranks: int, *flags: str) -> dict[int, float]:
    """What examples/train_megatron_fsdp.py prints, by step."""
    (tmp_path / "megatron").mkdir(exist_ok=True)
    (tmp_path / "megatron" / "__init__.py").touch()  # hides megatron-core
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    settings = ["--steps", str(STEPS), "--context", "64", "--batch", "8", "--report-every", "1"]
    command = [*launcher, str(EXAMPLES / "train_megatron_fsdp.py"), *settings, *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", result.stdout)}


@two_gpus
def test_example_matches_adamw_and_resumes_on_one_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    fused = losses(tmp_path, 2, "--checkpoint", path)
    resumed = losses(tmp_path, 1, "--resume", path)
    assert list(resumed) == list(range(STEPS // 2 + 1, STEPS + 1))
    for step, loss in resumed.items():  # BF16 gradients are summed in another order
        assert loss == pytest.approx(fused[step], abs=0.03), step
    adamw = losses(tmp_path, 2, "--optimizer", "torch")
    assert adamw[1] == fused[1] and adamw[STEPS] < adamw[1] - 2
    for step, loss in adamw.items():  # moments of one byte beside moments of four
        assert fused[step] == pytest.approx(loss, abs=0.03), step
