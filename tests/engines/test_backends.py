"""The compiled engines against the ``torch`` backend: the same bits in states, scales, masters and parameters.

On GPUs division is not IEEE's, so the update itself may differ by 2 units in the last place; what is stored of it is
compared with that margin there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_pair import Pair, UseBackend, assert_same_bits, gradients, one_group, parameters
from cases import FLOAT_DTYPES, FORMATS, MASTER, MASTERS, OPTIONS, SHAPES, Master, Shape, misaligned, values
from fused_optim.backends import load_engine, torch_reference
from fused_optim.quantized import Float8CurrentScaling, Float8DelayedScaling, QuantizedTensor, Recipe
from pairwise import pairwise
from peers import FusedAdam

ALL_MASTERS = pytest.mark.parametrize("master", MASTERS, ids=str)
PAIRS = [(m.dtype, v.dtype) for m in FORMATS for v in FORMATS]
SAME = [(fmt.dtype, fmt.dtype) for fmt in FORMATS]
MIXED = [*SAME, (torch.float32, torch.int8), (torch.int8, torch.bfloat16), (torch.float8_e4m3fn, torch.int8)]


def group_per_format(
    shapes: list[Shape], master: Master, device: str, formats: list[tuple[torch.dtype, torch.dtype]]
) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [
        {"params": parameters(shapes, master, device), "exp_avg_dtype": m, "exp_avg_sq_dtype": v} for m, v in formats
    ]


# --- every combination ------------------------------------------------------------------------------------------------


# Not all masters x gradients x kinds of rounding: each two of them.
@pytest.mark.parametrize("master, grad_dtype, stochastic", pairwise(MASTERS, FLOAT_DTYPES, [True, False]), ids=str)
def test_every_pair_of_formats(
    master: Master, grad_dtype: torch.dtype, stochastic: bool, engine: str, use_backend: UseBackend
) -> None:
    """One param group per pair of moment formats."""
    groups = group_per_format([Shape("block64", (3, 192), 64)], master, engine, PAIRS)
    pair = Pair(groups, engine, use_backend, stochastic_rounding=stochastic, **master.options)
    for step in range(2):
        pair.step(gradients(pair.reference.store.params, grad_dtype, engine, step))


@pytest.mark.parametrize("formats", MIXED, ids=lambda pair: "-".join(str(d).removeprefix("torch.") for d in pair))
@ALL_MASTERS
def test_every_shape(
    master: Master, formats: tuple[torch.dtype, torch.dtype], engine: str, use_backend: UseBackend
) -> None:
    options = {"exp_avg_dtype": formats[0], "exp_avg_sq_dtype": formats[1], **master.options}
    pair = Pair(one_group(SHAPES, master, engine), engine, use_backend, **options)
    for shape, param in zip(SHAPES, pair.compiled.store.params, strict=True):
        assert param.is_contiguous() or shape.layout.__name__ in ("transposed", "channels_last")
        if shape.layout is misaligned:
            assert param.data_ptr() % 16 == param.element_size()
    for step in range(2):
        pair.step(gradients(pair.reference.store.params, torch.bfloat16, engine, step))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, engine: str, use_backend: UseBackend) -> None:
    shapes = [Shape("block128", (5, 128), 128), Shape("odd", (7, 3), 0)]
    for formats in ((torch.float32, torch.float32), (torch.int8, torch.int8)):
        for corrected in (True, False):
            options = {"exp_avg_dtype": formats[0], "exp_avg_sq_dtype": formats[1], "bias_correction": corrected}
            options = {"lr": 0.001, "weight_decay": 0.0, **options, **OPTIONS[name]}
            pair = Pair(
                one_group(shapes, MASTER["bfloat16+float32"], engine),
                engine,
                use_backend,
                **options,
            )
            for step in range(3):
                pair.step(gradients(pair.reference.store.params, torch.float32, engine, step))


# --- gradients ------------------------------------------------------------------------------------------------------

EXTREMES = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 1e19, 65504.0, 6e-5, 6e-8, 1e-20, 1e-45]


@pytest.mark.parametrize("grad_dtype", FLOAT_DTYPES, ids=str)
@ALL_MASTERS
def test_extreme_gradients(master: Master, grad_dtype: torch.dtype, engine: str, use_backend: UseBackend) -> None:
    """Each extreme sits in a block of its own; the blocks beside it hold usual numbers."""
    shape = Shape("blocks", (2 * len(EXTREMES), 32), 32)

    pair = Pair(group_per_format([shape], master, engine, SAME), engine, use_backend, **master.options)
    for step in range(3):
        grads = gradients(pair.reference.store.params, grad_dtype, engine, step)
        for grad in grads:
            grad[::2, 5] = torch.tensor(EXTREMES).to(engine, grad_dtype)
            if step == 2:
                grad[::2, ::2] *= 1e-3
        pair.step(grads)
    for params in (pair.reference.store.params, pair.compiled.store.params):
        for param in params:
            assert bool(param[1::2].isfinite().all())


@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-42])
def test_tiny_gradients(size: float, engine: str, use_backend: UseBackend) -> None:
    """Second moments underflow, and blocks fade away to denormals: nothing becomes NaN."""
    shape = Shape("block128", (4, 128), 128)
    groups = group_per_format([shape], MASTER["bfloat16+float32"], engine, SAME)
    pair = Pair(groups, engine, use_backend, betas=(0.5, 0.5))
    for step in range(6):
        pair.step([grad * size**step for grad in gradients(pair.reference.store.params, torch.float32, engine, step)])
    assert all(bool(param.isfinite().all()) for param in pair.compiled.store.params)


@pytest.mark.parametrize("size", [2.0**60, 2.0**62.9, 2.0**68])
def test_huge_gradients(size: float, engine: str, use_backend: UseBackend) -> None:
    """Second moments up to the largest FP32 numbers, and first moments beyond: FP16's scales saturate."""
    shape = Shape("block128", (4, 128), 128)
    groups = group_per_format([shape], MASTER["bfloat16+float32"], engine, SAME)
    pair = Pair(groups, engine, use_backend, betas=(0.5, 0.999999))
    for step in range(3):
        pair.step([grad * size for grad in gradients(pair.reference.store.params, torch.float32, engine, step)])


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
@ALL_MASTERS
def test_parameters_that_round_to_infinity(
    master: Master, grad_dtype: torch.dtype, engine: str, use_backend: UseBackend
) -> None:
    """One of them is beyond BF16's largest number, but not beyond FP32's; the others, and the other tile, are usual."""
    shape = Shape("block128", (8, 128), 128)

    def groups() -> list[dict[str, Any]]:
        made = group_per_format([shape], master, engine, SAME)()
        for group in made:
            with torch.no_grad():
                group["params"][0][1, 7] = torch.finfo(master.param_dtype).max
        return made

    pair = Pair(groups, engine, use_backend, lr=1e36, weight_decay=0.0, **master.options)
    for step in range(3):
        grads = gradients(pair.reference.store.params, grad_dtype, engine, step)
        for grad in grads:
            grad[1, 7] = -1.0
        pair.step(grads)


@pytest.mark.parametrize("stochastic", [True, False], ids=["rotating", "nearest"])
def test_fp16_blocks_at_powers_of_two(stochastic: bool, engine: str, use_backend: UseBackend) -> None:
    """Their scale depends on where the largest values are rounded to: here down, up, or some of them each way."""
    shapes = [Shape("block128", (256, 128), 128), Shape("block64", (256, 64), 64), Shape("block32", (256, 96), 32)]
    options = {"betas": (0.0, 0.0), "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
    pair = Pair(
        one_group(shapes, MASTER["float32"], engine),
        engine,
        use_backend,
        stochastic_rounding=stochastic,
        **options,
    )
    for step in range(3):
        grads = []
        for shape in shapes:
            above = torch.arange(shape.shape[0] * shape.shape[1], device=engine).view(shape.shape) % 257 / 256
            grads.append((1 + above * 2.0**-11) * 4.0**step)
            grads[-1][:, 1::2] *= 2.0**-9
            grads[-1][::2, 2:] *= 0.75
        pair.step(grads)
    scales = torch.cat([pair.compiled.store.layouts[p].scale("exp_avg_sq") for p in pair.compiled.store.params])
    assert len(scales.unique()) == 2


def around_boundaries(dtype: torch.dtype, state: str, ulps: int = 3) -> Tensor:
    """Magnitudes at and beside those where the code changes, largest first, as parts of their block's largest.

    Of FP16 only some: it has too many codes.
    """
    if dtype == torch.float16:
        levels = torch.arange(0, 0x7800, 29).short().view(torch.float16).double().numpy() / 2**15
        middles = (levels[1:] + levels[:-1]) / 2
    else:
        code = next(fmt.moment(state).code for fmt in FORMATS if fmt.dtype == dtype)
        coded = code.coded((code.levels / code.levels[-1]) ** code.root, 1.0)
        middles = code.value((coded[1:] + coded[:-1]) / 2, 1.0)
    parts = torch.from_numpy(middles[::-1].copy()).float().view(-1, 1)
    steps = torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    return (parts.view(torch.int32) + steps).view(torch.float32).flatten()


@pytest.mark.parametrize("width", [128, 64, 32])
@pytest.mark.parametrize("stochastic", [True, False], ids=["rotating", "nearest"])
@pytest.mark.parametrize("dtype", [fmt.dtype for fmt in FORMATS if fmt.scaled], ids=str)
def test_boundaries_between_codes(
    dtype: torch.dtype, stochastic: bool, width: int, engine: str, use_backend: UseBackend
) -> None:
    """Every boundary, in blocks of similar values, where engines leave rare cases out, and in blocks with zeros."""
    first = around_boundaries(dtype, "exp_avg")
    second = around_boundaries(dtype, "exp_avg_sq").sqrt()  # of the gradient's square
    parts = torch.cat([first, second])
    parts = torch.cat([parts, parts.new_ones(-len(parts) % (width - 1))]).view(-1, width - 1)
    rows = torch.cat([torch.ones(len(parts), 1), parts], 1)
    mixed = rows.roll(width // 2, 0)
    mixed[:, 5::7] = 0.0
    rows = torch.cat([rows, mixed, torch.zeros(3, width)])
    rows[:, 1::2] *= -1.0
    shape = Shape("rows", tuple(rows.shape), width)
    options = {
        "betas": (0.0, 0.0),
        "exp_avg_dtype": dtype,
        "exp_avg_sq_dtype": dtype,
        "stochastic_rounding": stochastic,
    }
    pair = Pair(one_group([shape], MASTER["float32"], engine), engine, use_backend, **options)
    for size in (1.0, 2.0**-20, 3.1e-5):
        pair.step([(rows * size).to(engine)])


@pytest.mark.parametrize("master", [MASTER["bfloat16+rem16"], MASTER["bfloat16+rem8"]], ids=str)
def test_any_remainder_beside_any_parameter(master: Master, engine: str, use_backend: UseBackend) -> None:
    """Parameters may be written from outside, remainders stay: finite parameters give finite masters."""
    shape = Shape("bits", (256, 256), 128)
    shapes = [shape, replace(shape, layout=misaligned)]
    pair = Pair(one_group(shapes, master, engine), engine, use_backend, **{**master.options, "lr": 0.0})
    low = values(shape.shape, torch.float32, engine, seed=9).mul(2.0**14).to(torch.int16)
    low = low if master.dtype == torch.int16 else (low >> 8).to(torch.int8)
    for optimizer in (pair.reference, pair.compiled):
        optimizer.initialize_state()
        for i, param in enumerate(optimizer.store.params):
            high = torch.arange(2**16, device=engine).view(shape.shape).t() if i else torch.arange(2**16, device=engine)
            param.data.view(torch.int16).copy_(high.reshape(shape.shape).to(torch.int16))
            optimizer.state[param]["master_param"].copy_(low)
    finite = [param.isfinite() for param in pair.compiled.store.params]
    grads = [torch.ones(shape.shape, device=engine) for _ in finite]
    pair.step(grads)
    for param, was_finite in zip(pair.compiled.store.params, finite, strict=True):
        assert torch.equal(param.isfinite(), was_finite)


@pytest.mark.parametrize("grad_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("param_dtype", FLOAT_DTYPES, ids=str)
def test_gradient_dtype_is_free(param_dtype: torch.dtype, grad_dtype: torch.dtype, device: str) -> None:
    """``grad_dtype`` and ``decoupled_grad`` lead to the same step."""
    results = []
    for decoupled in (True, False):
        param = torch.nn.Parameter(values((4, 128), param_dtype, device, seed=0))
        grad = values((4, 128), grad_dtype, device, seed=1)
        if decoupled:
            param.decoupled_grad = grad
        else:
            param.grad_dtype = grad_dtype
            param.grad = grad
        optimizer = FusedAdam([param], lr=0.1, use_decoupled_grad=decoupled)
        optimizer.step()
        results.append((param, *optimizer.state[param].values()))
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second, "state")


def test_some_gradients_are_missing(engine: str, use_backend: UseBackend) -> None:
    pair = Pair(one_group(SHAPES, MASTER["bfloat16+rem16"], engine), engine, use_backend)
    for step in range(3):
        grads: list[Tensor | None] = list(gradients(pair.reference.store.params, torch.bfloat16, engine, step))
        grads[step::3] = [None] * len(grads[step::3])
        pair.step(grads)


def test_non_contiguous_gradients(engine: str, use_backend: UseBackend) -> None:
    shapes = [Shape("matrix", (96, 64), 64), Shape("vector", (300,), 0)]
    pair = Pair(one_group(shapes, MASTER["float32"], engine), engine, use_backend)
    matrix, vector = values((64, 96), torch.float32, engine, seed=1), values((900,), torch.float32, engine, seed=2)
    pair.step([matrix.t(), vector[::3]])
    pair.step([matrix[:1, :1].expand(96, 64), vector[1:301]])


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_thousands_of_tiny_tensors(engine: str, use_backend: UseBackend) -> None:
    """More tensors and param groups than fit into one launch."""
    shapes = [Shape("tiny", (1 + i % 37,), 0) if i % 5 else Shape("row", (1, 32), 32) for i in range(600)]

    def groups() -> list[dict[str, Any]]:
        params = parameters(shapes, MASTER["bfloat16+rem8"], engine)
        return [{"params": params[i::40], "lr": 0.001 * (i + 1)} for i in range(40)]

    options = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8, **MASTER["bfloat16+rem8"].options}
    pair = Pair(groups, engine, use_backend, **options)
    pair.step(gradients(pair.reference.store.params, torch.bfloat16, engine, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_large_tensors(dtype: torch.dtype, engine: str, use_backend: UseBackend) -> None:
    """Several chunks per tensor, and an odd end."""
    shapes = [Shape("matrix", (1500, 256), 128), Shape("vector", (200_003,), 128)]
    pair = Pair(
        one_group(shapes, MASTER["bfloat16+rem16"], engine),
        engine,
        use_backend,
        exp_avg_dtype=dtype,
        exp_avg_sq_dtype=dtype,
        **MASTER["bfloat16+rem16"].options,
    )
    for step in range(2):
        pair.step(gradients(pair.reference.store.params, torch.bfloat16, engine, step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_threads_do_not_change_bits(dtype: torch.dtype) -> None:
    shapes = [Shape("vector", (300_001,), 128), Shape("small", (3, 32), 32), Shape("matrix", (600, 160), 32)]
    results: list[list[Tensor]] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        params = parameters(shapes, MASTER["bfloat16"], "cpu")
        optimizer = FusedAdam(params, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, master_bits=0)
        for step in range(2):
            for param, grad in zip(params, gradients(params, torch.bfloat16, "cpu", step), strict=True):
                param.grad = grad
            optimizer.step()
        states = [optimizer.get_unscaled_state(p, name) for p in params for name in ("exp_avg", "exp_avg_sq")]
        results.append([*params, *states])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert_same_bits(second, first, "threads")


def large_steps(seed: int) -> Callable[[], Tensor]:
    """A function that makes a step of more elements than one thread takes, and returns the parameter."""
    param = torch.nn.Parameter(values((300_001,), torch.float32, "cpu", seed=seed))
    param.grad = values((300_001,), torch.float32, "cpu", seed=seed + 1)
    optimizer = FusedAdam([param], exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.int8)

    def step() -> Tensor:
        optimizer.step()
        return param.detach()

    return step


def test_steps_of_several_callers_share_threads(use_backend: UseBackend) -> None:
    use_backend("cpu")
    torch.set_num_threads(3)
    alone = [large_steps(seed)() for seed in range(4)]
    with ThreadPoolExecutor(4) as callers:
        together = list(callers.map(lambda step: step(), [large_steps(seed) for seed in range(4)]))
    for first, second in zip(alone, together, strict=True):
        assert_same_bits(second, first, "callers")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_processes_have_threads_of_their_own(use_backend: UseBackend) -> None:
    """The threads that wait for the next step stay behind in the parent."""
    use_backend("cpu")
    torch.set_num_threads(3)
    step = large_steps(0)
    step()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for threads it does not have
        step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    step()


def test_backend_is_chosen_at_each_step(engine: str, use_backend: UseBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch_reference, "run", lambda groups: calls.append(len(groups)))
    param = torch.nn.Parameter(torch.ones(8, device=engine))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param])
    use_backend("torch")
    optimizer.step()
    assert calls == [1] and bool((param == 1).all())
    use_backend(engine)
    optimizer.step()
    assert calls == [1] and bool((param < 1).all())


@pytest.mark.parametrize("recipe", [Float8DelayedScaling(), Float8CurrentScaling()], ids=repr)
def test_backend_of_scales_is_chosen_at_each_step(
    recipe: Recipe, engine: str, use_backend: UseBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lasts of weights from step to step does not outlast the backend."""
    weight = torch.nn.Parameter(QuantizedTensor.from_values(values((2, 128), torch.bfloat16, engine, seed=0), recipe))
    weight.grad = torch.ones(2, 128, dtype=torch.bfloat16, device=engine)
    optimizer = FusedAdam([weight])
    compiled, calls = load_engine(engine)[0], []
    for name in ("quantize_rescale", "quantize_encode"):
        run = getattr(compiled, name)
        monkeypatch.setattr(compiled, name, lambda run=run, **options: calls.append(run) or run(**options))
    for backend, expected in ((engine, 2), ("torch", 0), (engine, 2)):
        use_backend(backend)
        calls.clear()
        optimizer.step()
        assert len(calls) == expected
