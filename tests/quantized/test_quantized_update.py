"""Quantized weights that the update pass writes itself: bit for bit what the recipes make of the masters.

On the CPU masters have the bits of the reference backend, too; a GPU's may differ in the last two places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distributed import same_bits
from fused_optim import adapters
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    QuantizedTensor,
    Recipe,
    finish_initialization,
)
from fused_optim.quantized.recipes import codec as quantizer
from pairwise import pairwise
from peers import FusedAdam
from quantized_cases import RECIPES, values

F32, BF16, F16, E4M3, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
ALL = {**RECIPES, "rows, FP32 scales": Float8BlockScaling((1, 128))}
# Written by the pass: blocks within rows, and scales known before it.
DIRECT = ["delayed", "recent", "rows", "mxfp8", "mxfp8up", "rows, FP32 scales"]
MOMENTS = [(F32, F32), (BF16, BF16), (F16, F16), (E4M3, E4M3), (INT8, INT8)]
MIXED = [(E4M3, INT8), (INT8, F32)]
SHAPES = [(3, 128), (33, 256), (1, 4096), (130, 384), (5, 96), (7, 144), (0, 128), (40, 1024)]

recipe_of = pytest.mark.parametrize("recipe", ALL)
moments_of = pytest.mark.parametrize("moments", MOMENTS + MIXED, ids=lambda pair: "-".join(str(x)[6:] for x in pair))


@contextmanager
def refused(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """These functions of ``recipes.codec``, which run after an update, may have nothing to do."""

    def refuse(weights: Any, *_: object) -> Tensor:
        assert not list(weights), "a pass of its own"
        return torch.empty(0)

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(quantizer, name, refuse)
        yield


class Training:
    """Weights of several shapes, beside parameters that are not quantized, in two param groups."""

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        moments: tuple[torch.dtype, torch.dtype] = (INT8, INT8),
        shapes: list[tuple[int, int]] = SHAPES,
        plain: bool = True,
        **options: Any,
    ) -> None:
        weights = [quantized(values(shape, i), recipe, device) for i, shape in enumerate(shapes)]
        others = [(64, 128), (130,)] if plain else []
        params = [nn.Parameter(values(shape, 99).bfloat16().to(device)) for shape in others]
        groups = [{"params": weights[::2] + params, "lr": 0.1}, {"params": weights[1::2], "weight_decay": 0.3}]
        formats = {"exp_avg_dtype": moments[0], "exp_avg_sq_dtype": moments[1]}
        self.optimizer = FusedAdam(
            [g for g in groups if g["params"]],
            lr=0.01,
            seed=5,
            **{"decoupled_weight_decay": True, **formats, **options},
        )
        self.optimizer.initialize_state()

    def params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def set_gradients(self, step: int) -> None:
        """FP32 ones beside the parameter's own where they may have another dtype."""
        decoupled = self.optimizer.use_decoupled_grad
        for i, param in enumerate(self.params()):
            grad = values(tuple(param.shape), 7, i, step).to(param.device, F32 if decoupled and i % 2 else BF16)
            setattr(param, "decoupled_grad" if decoupled else "grad", grad)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.set_gradients(step)
            self.step()

    def step(self) -> None:
        """A step, after which every weight must be its master quantized by the recipe's PyTorch."""
        expected = [components(param) for param in self.params()]
        self.optimizer.step()
        for i, (param, parts) in enumerate(zip(self.params(), expected, strict=True)):
            if isinstance(param, QuantizedTensor) and gradient_of(param) is not None:
                master = self.optimizer.get_unscaled_state(param, "master_param").cpu()
                param.recipe.prepare(parts, None)
                param.recipe.rescale(parts, param.recipe.absmax(master), None, True)
                param.recipe.encode(master, parts)
            assert_same([components(param)], [parts], i)

    def found(self) -> list[dict[str, Tensor]]:
        """Of each parameter: its components or itself, and its states."""
        result = []
        for param in self.params():
            own = components(param) or {"param": param.detach()}
            result.append({name: part.cpu().clone() for name, part in (own | self.optimizer.state[param]).items()})
        return result


def quantized(full: Tensor, recipe: Recipe, device: str) -> nn.Parameter:
    local = QuantizedTensor.from_values(full.bfloat16().to(device), recipe, keep_initial=True)
    return nn.Parameter(local)


def components(param: Tensor) -> dict[str, Tensor]:
    """Copies; none of what is not quantized."""
    if not isinstance(param, QuantizedTensor):
        return {}
    return {part.name: param.components[part.name].cpu().clone() for part in param.recipe.components}


def gradient_of(param: Tensor) -> Tensor | None:
    return getattr(param, "decoupled_grad", None) if param.grad is None else param.grad


def assert_same(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], first: int = 0) -> None:
    """Bit for bit; ``first``: the number of the first parameter."""
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True), first):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert same_bits(ours[name], value), (i, name)


def both(engine: str, use_backend: Callable[[str], None]) -> Iterator[str]:
    """Devices: the engine's, and after the CPU engine's run that of the reference backend."""
    for backend in (engine, "torch") if engine == "cpu" else (engine,):
        use_backend(backend)
        yield engine


def assert_all_same(results: list[list[dict[str, Tensor]]]) -> None:
    for result in results[1:]:
        assert_same(results[0], result)


def compare(
    recipe: Recipe, engine: str, use_backend: Callable[[str], None], *, last: int | None = None, **options: Any
) -> None:
    """After so many steps; by default after one that finds states, and histories that go round."""
    if last is None:
        last = 3 if isinstance(recipe, Float8DelayedScaling) else 2
    results = []
    for device in both(engine, use_backend):
        training = Training(recipe, device, **options)
        training.steps(0, last)
        results.append(training.found())
    assert_all_same(results)


@moments_of
@recipe_of
def test_pass_writes_what_the_reference_writes(
    recipe: str, moments: tuple[torch.dtype, torch.dtype], engine: str, use_backend: Callable[[str], None]
) -> None:
    compare(ALL[recipe], engine, use_backend, moments=moments)


# Not all recipes x moments x ways to round: each two of them.
@pytest.mark.parametrize(
    "recipe, moments, stochastic",
    pairwise(list(ALL), [(F32, F32), (INT8, INT8), (E4M3, INT8)], [True, False]),
    ids=str,
)
def test_fp16_masters(
    recipe: str,
    moments: tuple[torch.dtype, torch.dtype],
    stochastic: bool,
    engine: str,
    use_backend: Callable[[str], None],
) -> None:
    """Weights are what their masters are after they were rounded; those without blocks have FP32 masters."""
    options = {"master_weight_dtype": F16, "stochastic_rounding": stochastic}
    compare(ALL[recipe], engine, use_backend, moments=moments, **options)


@pytest.mark.parametrize(
    "options",
    [{"plain": False}, {"weight_decay": 0.1, "decoupled_weight_decay": False}, {"use_decoupled_grad": True}],
    ids=str,
)
@pytest.mark.parametrize("recipe", DIRECT)
def test_options_of_steps(
    recipe: str, options: dict[str, Any], engine: str, use_backend: Callable[[str], None]
) -> None:
    compare(ALL[recipe], engine, use_backend, **options)


@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("recipe", DIRECT)
def test_codes_need_no_second_pass(
    recipe: str, moments: tuple[torch.dtype, torch.dtype], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(ALL[recipe], engine, moments, [(130, 384), (3, 128)])
    before = training.found()
    with refused(monkeypatch, "encode", "absmax"):
        training.steps(0, 2)
    for ours, theirs in zip(training.found()[:2], before[:2], strict=True):
        assert not torch.equal(
            ours["data" if "data" in ours else "param"], theirs["data" if "data" in ours else "param"]
        )


@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_scales_of_whole_weights_need_no_pass_of_their_own(
    recipe: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update measures what they come from."""
    training = Training(ALL[recipe], engine)
    with refused(monkeypatch, "absmax"):
        training.steps(0, 2)
    for param in training.params():
        if isinstance(param, QuantizedTensor) and param.numel():
            master = training.optimizer.state[param]["master_param"].cpu()
            expected = QuantizedTensor.from_values(master, param.recipe)
            assert torch.equal(param.components["tensor_scale"].cpu(), expected.components["tensor_scale"])


@given(st.data())
def test_any_shape_and_gradient(engine: str, use_backend: Callable[[str], None], data: st.DataObject) -> None:
    """Odd shapes, memory that begins anywhere, gradients that are huge, tiny or not finite."""
    recipe = ALL[data.draw(st.sampled_from(list(ALL)))]
    moments = data.draw(st.sampled_from(MOMENTS))
    columns = st.sampled_from([16, 32, 96, 128, 160, 256, 384]) | st.integers(1, 40).map(lambda n: 2 * n)
    shape = (data.draw(st.integers(1, 40)), data.draw(columns))
    special = data.draw(st.sampled_from([None, 1e30, 1e-30, float("inf"), float("nan")]))
    offset = data.draw(st.sampled_from([0, 1, 2, 4, 16]))
    results = []
    for device in both(engine, use_backend):
        training = Training(recipe, device, moments, [shape], plain=False, weight_decay=0.0)
        (weight,) = training.params()
        shift(weight, offset)
        for step in range(2):
            training.set_gradients(step)
            if special is not None:
                weight.grad.view(-1)[-1] = special
            training.step()
        results.append(training.found())
    assert_all_same(results)


def shift(weight: QuantizedTensor, offset: int) -> None:
    """Moves the codes to an address that nothing is aligned to."""
    data = weight.components["data"]
    memory = torch.zeros(data.numel() + offset, dtype=torch.uint8, device=data.device)
    moved = memory[offset:].view(data.shape)
    weight.components["data"] = moved.copy_(data)


@pytest.mark.parametrize(
    "recipe",
    ["mxfp8", *(pytest.param(each, marks=pytest.mark.long) for each in [*DIRECT, "current"] if each != "mxfp8")],
)
def test_more_weights_than_a_launch_takes(recipe: str, engine: str, use_backend: Callable[[str], None]) -> None:
    """Only the CUDA engine launches; there, twice."""
    on_cpu = engine == "cpu"
    shapes = [(2, 128), (1, 32)] * (20 if on_cpu else 200)
    compare(ALL[recipe], engine, use_backend, shapes=shapes, last=1 if on_cpu else 2)


def test_steps_of_many_mixes(engine: str, use_backend: Callable[[str], None]) -> None:
    """Weights of several recipes and state formats, and masters in remainders beside them, in one optimizer."""
    results = []
    for device in both(engine, use_backend):
        groups = []
        for i, (name, moments) in enumerate(itertools.product(ALL, [(F32, F32), (E4M3, E4M3), (INT8, BF16)])):
            weight = quantized(values((40, 128), i), ALL[name], device)
            groups.append({"params": [weight], "exp_avg_dtype": moments[0], "exp_avg_sq_dtype": moments[1]})
        big = nn.Parameter(values((256, 512), 1).bfloat16().to(device))
        groups.append({"params": [big], "exp_avg_dtype": INT8})
        training = Training(ALL["mxfp8"], device)
        training.optimizer = FusedAdam(groups, lr=0.01)
        training.steps(0, 3)
        results.append(training.found())
    assert_all_same(results)


@pytest.mark.parametrize("master", [torch.float32, F16], ids=str)
@pytest.mark.parametrize("recipe", ALL)
def test_skipped_steps_change_nothing(
    recipe: str, master: torch.dtype, engine: str, use_backend: Callable[[str], None]
) -> None:
    for device in both(engine, use_backend):
        training = Training(ALL[recipe], device, master_weight_dtype=master)
        training.steps(0, 2)
        before = training.found()
        training.set_gradients(2)
        training.optimizer.grad_scale = torch.tensor(1.0, device=device)
        training.optimizer.found_inf = torch.tensor(1.0, device=device)
        training.optimizer.step()
        assert_same(training.found(), before)


@pytest.mark.parametrize("recipe", ["delayed", "recent"])
def test_zeros_get_a_scale_of_one_before_they_are_known(
    recipe: str, engine: str, use_backend: Callable[[str], None]
) -> None:
    """Weights that begin as zeros, as output projections may: the second update knows how large they have become."""
    for device in both(engine, use_backend):
        check_scales_of_zeros(ALL[recipe], device)


def check_scales_of_zeros(recipe: Float8DelayedScaling, device: str) -> None:
    training = Training(recipe, device, shapes=[(8, 64)], plain=False)
    (weight,) = training.params()
    weight.data = quantized(torch.zeros(8, 64), recipe, device).data
    training.optimizer.state[weight]["master_param"].zero_()
    scale = 1.0
    for step in range(3):
        training.steps(step, step + 1)
        assert weight.components["tensor_scale"].item() == scale
        scale = training.optimizer.state[weight]["master_param"].abs().max().cpu() / 448 * 2.0**recipe.margin


def test_initial_values_that_come_back_are_freed(engine: str) -> None:
    """As those of shards do into which plain values are copied, of a weight that steps have updated."""
    training = Training(Float8DelayedScaling(), engine, shapes=[(4, 128), (2, 128)], plain=False)
    training.steps(0, 2)
    weight = training.params()[0]
    assert isinstance(weight, QuantizedTensor) and not weight.has_initial
    weight.write_pending(torch.full_like(weight, 2.0))
    finish_initialization(nn.ParameterList([weight]))
    assert weight.has_initial
    training.set_gradients(2)
    training.optimizer.step()
    assert not weight.has_initial and not weight.is_pending


def test_versions_count_the_codes(engine: str) -> None:
    """So autograd notices weights that change between forward and backward."""
    training = Training(MXFP8BlockScaling(), engine, shapes=[(4, 128)], plain=False)
    (weight,) = training.params()
    versions = {name: part._version for name, part in weight.components.items()}
    training.steps(0, 1)
    assert all(weight.components[name]._version > version for name, version in versions.items() if name != "initial")


@pytest.mark.parametrize("recipe", ["mxfp8", "rows", "delayed", "current"])
def test_memory_may_change_between_steps(recipe: str, engine: str, use_backend: Callable[[str], None]) -> None:
    """Components, masters and states that were replaced or moved are found, gradients may be missing."""
    results = []
    for device in both(engine, use_backend):
        training = Training(ALL[recipe], device, shapes=[(8, 128), (8, 256), (4, 128)], plain=False)
        first, second, third = training.params()
        training.steps(0, 2)
        for name in ("data", "scale", "tensor_scale", "amax_history"):
            if name in first.components:
                first.components[name] = first.components[name].clone()
                second.components[name].data = second.components[name].clone()
        states = training.optimizer.state[third]
        states["master_param"] = states["master_param"].clone()
        training.steps(2, 4)
        training.set_gradients(4)
        first.grad = None
        training.step()
        training.steps(5, 7)
        results.append(training.found())
    assert_all_same(results)


@pytest.mark.parametrize("name", ["data", "scale"])
def test_components_that_do_not_fit_are_refused(name: str, engine: str) -> None:
    """Before anything is written, whether they were replaced or given other memory."""
    for replaces in (True, False):
        training = Training(ALL["mxfp8"], engine, shapes=[(8, 128)], plain=False)
        (weight,) = training.params()
        training.steps(0, 2)
        small = torch.zeros(2, dtype=torch.uint8, device=engine)
        if replaces:
            weight.components[name] = small
        else:
            weight.components[name].data = small
        before = training.found()
        training.set_gradients(2)
        with pytest.raises(ValueError, match=f"component '{name}'.*expected torch.uint8 of shape"):
            training.optimizer.step()
        assert_same(training.found(), before)


def test_freed_weights_are_refused(engine: str) -> None:
    training = Training(ALL["mxfp8"], engine, shapes=[(8, 256), (8, 128)], plain=False)
    training.steps(0, 2)
    others, weight = training.params()
    weight.components["data"].untyped_storage().resize_(0)
    for step in range(2, 4):
        training.set_gradients(step)
        others.grad = values((256, 8), step).to(engine, BF16).t()  # is made contiguous for the step
        with pytest.raises(RuntimeError, match="has been freed"):
            training.optimizer.step()
        (part,) = training.optimizer.stepper._plan.parts
        assert not part.shards.works, "memory of refused steps is kept"


@pytest.mark.parametrize("dtype", [torch.float64, BF16], ids=str)
@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4"])
def test_torchs_default_dtype_does_not_matter(recipe: str, dtype: torch.dtype, engine: str) -> None:
    training = Training(ALL[recipe], engine)
    torch.set_default_dtype(dtype)
    try:
        training.steps(0, 2)
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    finally:
        torch.set_default_dtype(F32)
    training.steps(2, 3)


def test_unchanged_weights_are_not_described_again(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(ALL["delayed"], engine)
    training.steps(0, 2)
    monkeypatch.setattr(training.optimizer.stepper._plan, "_set", lambda *_: pytest.fail("described again"))
    monkeypatch.setattr(adapters, "batches", lambda *_: pytest.fail("batched again"))
    training.steps(2, 4)
