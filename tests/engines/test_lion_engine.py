"""Lion in the compiled engines, driven through their tables of shards: the same bits as a few lines of PyTorch.

On every device: Lion divides by nothing, so GPUs give the same bits as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cases import FLOAT_DTYPES, values
from fused_optim.backends import load_engine
from fused_optim.backends.compiled import run_on
from fused_optim.formats.arithmetic import MASK32, fma
from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.formats.masters import Master, MasterTensors
from fused_optim.formats.rounding import GOLDEN_RATIO, rounding_bits
from fused_optim.formats.states import STATE_FORMATS, Kind, StateFormat, decode_state, encode_state
from fused_optim.quantized import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from fused_optim.rules import RULES
from shard_works import ELEMENT_NUMBERS, shard_work

FORMATS = sorted(set(STATE_FORMATS.values()), key=lambda fmt: fmt.code)
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
PARAMETERS = [(dtype, Master.PARAMETER) for dtype in FLOAT_DTYPES]
PARAMETERS += [(dtype, kind) for dtype in FLOAT_DTYPES[1:] for kind in (Master.FLOAT32, Master.FLOAT16)]
PARAMETERS += [(torch.bfloat16, kind) for kind in (Master.REMAINDER16, Master.REMAINDER8)]
ALL_PARAMETERS = pytest.mark.parametrize(("dtype", "kind"), PARAMETERS, ids=lambda x: getattr(x, "name", str(x)))
SIZES = [(1, 128), (31, 32), (129, 128), (256, 64), (1000, 32), (5003, 128), (20_480, 128), (3333, 64)]
RULE = list(RULES).index("lion")
KEY, OFFSET = 0x12345678, 2**35 - 4096


def rounded(x: float) -> float:
    """To FP32."""
    return float(np.float32(x))


@dataclass(frozen=True)
class Group:
    """Hyperparameters of a step."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    step: int = 1
    decoupled: bool = True
    maximize: bool = False
    stochastic: bool = True
    pointers: dict[str, Tensor] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, ...]:
        numbers = self.lr, self.weight_decay, [self.beta1, self.beta2], self.step
        return *numbers, self.decoupled, self.maximize, self.stochastic


class Shard:
    """A parameter with its gradient, momentum and master, in memory as an engine has them."""

    def __init__(
        self, numel: int, block: int, dtype: torch.dtype, kind: Master, fmt: StateFormat, device: str, *, first: int = 0
    ) -> None:
        self.numel, self.block, self.kind, self.fmt, self.first = numel, block, kind, fmt, first
        self.elements = torch.arange(numel, device=device) + OFFSET + first
        blocks = -(-numel // block)
        self.scales = torch.zeros(blocks * (fmt.scaled + (kind is Master.FLOAT16)), device=device)
        self.momentum_scale = self.scales[:blocks] if fmt.scaled else None
        self.master_scale = self.scales[blocks * fmt.scaled :] if kind is Master.FLOAT16 else None
        start = values((numel,), torch.float32, device, seed=numel)
        self.param = self._placed(start.to(dtype))
        self.momentum = self._placed(torch.zeros(numel, dtype=fmt.signed_dtype, device=device))
        self.master: Tensor | None = None
        if kind is not Master.PARAMETER:
            self.master = self._placed(torch.zeros(numel, dtype=kind.dtype, device=device))
            kind.codec.write(self.tensors, self.param.float())
        self.grad = self.param

    def _placed(self, x: Tensor) -> Tensor:
        """At element ``first`` of its memory, which may be aligned to nothing."""
        memory = torch.zeros(self.first + self.numel, dtype=x.dtype, device=x.device)
        memory[self.first :].copy_(x)
        return memory[self.first :]

    def set_grad(self, dtype: torch.dtype, seed: int) -> None:
        self.grad = self._placed(values((self.numel,), dtype, str(self.param.device), seed=seed, spread=2.0))

    def arguments(self) -> dict[str, Any]:
        return {
            "grad": self.grad.data_ptr(),
            "param": self.param.data_ptr(),
            "master": 0 if self.master is None else self.master.data_ptr(),
            "states": (self.momentum.data_ptr(),),
            "scales": self.scales.data_ptr(),
            "numel": self.numel,
            "offset": OFFSET + self.first,
            "inner_local": max(self.numel, 1),
            "inner_global": max(self.numel, 1),
            "key": KEY,
            "grad_type": ELEMENT_TYPES[self.grad.dtype],
            "param_type": ELEMENT_TYPES[self.param.dtype],
            "master_kind": self.kind,
            "state_formats": (self.fmt.code,),
            "block_log2": self.block.bit_length() - 1,
        }

    @property
    def tensors(self) -> MasterTensors:
        return MasterTensors(self.param, self.master, self.master_scale, self.block)

    def read_master(self) -> Tensor:
        return self.kind.codec.read(self.tensors)

    def step(self, group: Group) -> None:
        """The reference."""
        before = self.read_master()
        momentum = decode_state(self.momentum, self.momentum_scale, Kind.SIGNED, self.fmt, self.block)
        grad = self.grad.float() * (-1.0 if group.maximize else 1.0)
        if not group.decoupled:
            grad = fma(before, rounded(group.weight_decay), grad)
        mixed = fma(momentum, rounded(group.beta1), rounded(1.0 - group.beta1) * grad)
        momentum = fma(momentum, rounded(group.beta2), rounded(1.0 - group.beta2) * grad)
        sign = torch.where(mixed.isnan(), mixed, mixed.sign())
        decay = rounded(1.0 - group.lr * group.weight_decay) if group.decoupled else 1.0
        after = fma(sign, -rounded(group.lr), before * decay)
        u = rounding_bits(KEY, self.elements, group.step * GOLDEN_RATIO & MASK32 if group.stochastic else None)
        bits, scale = encode_state(momentum, Kind.SIGNED, self.fmt, self.block, u)
        self.momentum.copy_(bits)
        if self.momentum_scale is not None and scale is not None:
            self.momentum_scale.copy_(scale)
        self.kind.codec.write(self.tensors, after, self.kind.codec.fractions(before, after, u))

    def stored(self) -> dict[str, Tensor]:
        found = {"param": self.param, "momentum": self.momentum, "scales": self.scales, "grad": self.grad}
        return found if self.master is None else {**found, "master": self.master}


def launch(shards: list[Shard], group: Group, device: str, **weight: Any) -> None:
    """A step of the engine."""
    engine: Any = load_engine(device)[0]
    reader = engine.TensorReader(None, Tensor, keys=[], examples=[], copied=[])
    numbers = [0] * len(shards)
    table = engine.ShardTable(RULE, ["momentum"], numbers, 1, reader, reader, ELEMENT_NUMBERS, DTensor)
    table.set_group(0, *group.arguments(), **{name: x.data_ptr() for name, x in group.pointers.items()})
    for i, shard in enumerate(shards):
        table.set_shard(i, shard_work(**{**shard.arguments(), **weight}))
    workspace = torch.empty(1024, dtype=torch.uint8, device=device)
    memory = {"workspace": workspace.data_ptr(), "workspace_size": 1024} if device == "cuda" else {}
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    table.launch(**memory, **run_on(place))
    if device == "cuda":
        torch.cuda.synchronize()


def assert_same_bits(actual: Shard, expected: Shard) -> None:
    """Equal bits; where a block is poisoned, its codes mean nothing."""
    others = expected.stored()
    for name, found in actual.stored().items():
        other = others[name]
        if name == "momentum" and expected.momentum_scale is not None:
            hit = expected.momentum_scale.isnan().repeat_interleave(expected.block)[: expected.numel]
            found, other = found.masked_fill(hit, 0), other.masked_fill(hit, 0)
        same = (found == other) & (found.signbit() == other.signbit())
        different = ~same & ~((found != found) & (other != other))
        assert not bool(different.any()), f"{name}: {int(different.sum())} of {found.numel()} differ"


def pairs_of(dtype: torch.dtype, kind: Master, fmt: StateFormat, device: str) -> list[tuple[Shard, Shard]]:
    """Equal shards, for an engine and for the reference; every other one is aligned to nothing."""
    made = [(*size, dtype, kind, fmt, device) for size in SIZES]
    return [(Shard(*each, first=i % 2), Shard(*each, first=i % 2)) for i, each in enumerate(made)]


def step_both(pairs: list[tuple[Shard, Shard]], group: Group, device: str, grad_dtype: torch.dtype) -> None:
    for number, pair in enumerate(pairs):
        for shard in pair:
            shard.set_grad(grad_dtype, seed=100 * group.step + number)
    launch([ours for ours, _ in pairs], group, device)
    for ours, reference in pairs:
        reference.step(group)
        assert_same_bits(ours, reference)


@pytest.mark.parametrize("grad_dtype", FLOAT_DTYPES, ids=str)
@ALL_FORMATS
@ALL_PARAMETERS
def test_every_format_and_master(
    dtype: torch.dtype, kind: Master, fmt: StateFormat, grad_dtype: torch.dtype, engine: str
) -> None:
    pairs = pairs_of(dtype, kind, fmt, engine)
    for step in (1, 2, 3):
        step_both(pairs, Group(step=step, stochastic=step != 2), engine, grad_dtype)


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[-1]], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    "options",
    [
        {"beta1": 0.95, "beta2": 0.98, "lr": 1e-4},
        {"beta1": 0.0, "beta2": 0.0},
        {"weight_decay": 0.0},
        {"decoupled": False},
        {"maximize": True},
        {"maximize": True, "decoupled": False},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any], fmt: StateFormat, engine: str) -> None:
    pairs = pairs_of(torch.bfloat16, Master.FLOAT32, fmt, engine)
    for step in (1, 2):
        step_both(pairs, Group(step=step, **options), engine, torch.float32)


@ALL_FORMATS
def test_float64_by_formula(fmt: StateFormat, engine: str) -> None:
    """From the momentum as it is stored: beside the codecs, only the roundings of FP32 are left."""
    shard = Shard(5003, 128, torch.float32, Master.PARAMETER, fmt, engine)
    for step in range(1, 6):
        shard.set_grad(torch.float32, seed=step)
        before, grad = shard.param.double(), shard.grad.double()
        momentum = decode_state(shard.momentum, shard.momentum_scale, "exp_avg", fmt, 128).double()
        launch([shard], Group(step=step, lr=0.003), engine)
        direction = torch.sign(0.9 * momentum + 0.1 * grad)
        expected = before * (1 - 0.003 * 0.1) - 0.003 * direction
        torch.testing.assert_close(shard.param.double(), expected, rtol=3e-7, atol=3e-10)
        kept = decode_state(shard.momentum, shard.momentum_scale, "exp_avg", fmt, 128).double()
        largest = torch.nn.functional.pad(0.99 * momentum + 0.01 * grad, (0, -5003 % 128)).view(-1, 128).abs().amax(1)
        bound = largest.repeat_interleave(128)[:5003] * {4: 3e-7, 2: 2**-7, 1: 2**-3}[shard.momentum.element_size()]
        assert bool(((kept - (0.99 * momentum + 0.01 * grad)).abs() <= bound).all())


@ALL_FORMATS
def test_zeros_only_decay_and_nan_is_handed_on(fmt: StateFormat, engine: str) -> None:
    shard, reference = (Shard(1024, 128, torch.float32, Master.PARAMETER, fmt, engine) for _ in range(2))
    before = shard.param.clone()
    for each in (shard, reference):
        each.set_grad(torch.float32, seed=1)
        each.grad[:512] = 0.0
        each.grad[1:512:2] = -0.0
        each.grad[700], each.grad[900] = float("nan"), float("inf")
    launch([shard], Group(), engine)
    reference.step(Group())
    assert_same_bits(shard, reference)
    assert torch.equal(shard.param[:512], before[:512] * rounded(1 - 0.01 * 0.1))
    assert bool(shard.param[700].isnan()) and int(shard.param.isnan().sum()) == 1
    assert not bool(decode_state(shard.momentum, shard.momentum_scale, "exp_avg", fmt, 128)[700].isfinite())


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_hyperparameters_on_the_device(found_inf: float, engine: str) -> None:
    shard, reference = (Shard(5003, 128, torch.bfloat16, Master.PARAMETER, FORMATS[-1], engine) for _ in range(2))
    numbers = {"lr_pointer": 0.02, "grad_scale": 4.0, "grad_factor": 4.0, "found_inf": found_inf}
    pointers = {name: torch.tensor([number], device=engine) for name, number in numbers.items()}
    steps = torch.tensor([6], device=engine)
    for each in (shard, reference):
        each.set_grad(torch.float32, seed=1)
    launch([shard], Group(lr=0.5, pointers={**pointers, "step_pointer": steps}), engine)
    assert int(steps) == (6 if found_inf else 7)
    if not found_inf:
        reference.step(Group(lr=rounded(0.02), step=7))
        reference.grad.div_(4.0)
    assert_same_bits(shard, reference)


@pytest.mark.parametrize("kind", [Master.FLOAT32, Master.FLOAT16], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), Float8BlockScaling((1, 128), power_of_two=True), MXFP8BlockScaling()], ids=repr
)
@ALL_FORMATS
def test_quantized_weights_are_written_by_the_update(
    fmt: StateFormat, recipe: Recipe, kind: Master, engine: str
) -> None:
    compiled: Any = load_engine(engine)[0]
    has_kernels = fmt.name != "float16"  # rules.toml: own_kernels
    assert compiled.writes_weights(RULE, (fmt.code,)) == (engine == "cpu" or has_kernels)
    if engine == "cuda" and not has_kernels:
        return
    shape = (12, 384)
    ours, reference = (Shard(12 * 384, 128, torch.float32, Master.FLOAT32, fmt, engine) for _ in range(2))
    if kind is Master.FLOAT16:
        ours, reference = (Shard(12 * 384, 128, torch.bfloat16, kind, fmt, engine) for _ in range(2))
    written, expected = recipe.empty(shape, torch.device(engine)), recipe.empty(shape, torch.device(engine))
    absmax = torch.zeros(1, device=engine)
    if recipe.scales_whole_tensor:
        for components in (written, expected):
            components["tensor_scale"].fill_(0.01)
    assert recipe.kernel is not None
    weight = {
        "param": written["data"].data_ptr(),
        "weight_scales": written["tensor_scale" if recipe.scales_whole_tensor else "scale"].data_ptr(),
        "weight_format": recipe.kernel.format,
        "round_up": recipe.kernel.round_up,
        "absmax": absmax.data_ptr(),
    }
    for step in (1, 2):
        for shard in (ours, reference):
            shard.set_grad(torch.bfloat16, seed=step)
        launch([ours], Group(step=step), engine, **weight)
        reference.step(Group(step=step))
        recipe.encode(reference.read_master().view(shape), expected, None)
        ours.param.copy_(reference.param)  # which nobody has written
        assert_same_bits(ours, reference)
        for name, component in expected.items():
            assert torch.equal(written[name].view(torch.uint8), component.view(torch.uint8)), name
    assert float(absmax) >= float(reference.read_master().abs().max())


def test_a_plan_takes_the_states_of_its_rule(engine: str) -> None:
    shard = Shard(8, 128, torch.float32, Master.PARAMETER, FORMATS[0], engine)
    twice = {"states": (64, 64), "state_formats": (0, 0)}
    with pytest.raises(ValueError, match="as many states as the rule has"):
        launch([shard], Group(), engine, **twice)
    compiled: Any = load_engine(engine)[0]
    for formats in ((), (0, 0)):
        with pytest.raises(ValueError, match="as many states as the rule has"):
            compiled.writes_weights(RULE, formats)
