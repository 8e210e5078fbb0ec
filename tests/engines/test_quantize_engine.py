"""The compiled quantizers: bit for bit the PyTorch reference of the recipes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fused_optim import FusedAdam
from fused_optim.adapters import Fractions
from fused_optim.backends import load_engine
from fused_optim.backends.compiled import run_on
from fused_optim.formats.arithmetic import MASK32
from fused_optim.formats.rounding import GOLDEN_RATIO
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.recipes import RECIPES, elements
from fused_optim.quantized.recipes import codec as quantizer
from fused_optim.quantized.recipes.codec import Encoding
from fused_optim.sharding.dtensor import Geometry
from pairwise import pairwise

ALL = [
    Float8CurrentScaling(),
    Float8DelayedScaling(amax_history_len=3),
    Float8DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1),
    Float8BlockScaling(),
    Float8BlockScaling(power_of_two=True),
    Float8BlockScaling((1, 128)),
    Float8BlockScaling((1, 128), power_of_two=True),
    MXFP8BlockScaling(round_up=False),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 3, 5, 16, 17, 31, 32, 33, 64, 127, 128, 129, 130, 200, 256, 260, 384]
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, 3e38, -3e38, 3.4028234663852886e38, 448.0, 464.0, 6.0, 5.0, 2.5]
NOT_FINITE = [math.inf, -math.inf, math.nan]


@contextmanager
def engine_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference raises: what passes was done by the compiled engine."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the reference was used")

    with monkeypatch.context() as patch:
        for recipe in (Recipe, *RECIPES.values()):
            for name in ("encode", "decode", "rescale", "absmax"):
                if name in vars(recipe):
                    patch.setattr(recipe, name, refuse)
        yield


def bits(x: Tensor) -> Tensor:
    """As integers, with all NaN alike."""
    x = torch.where(x.isnan(), torch.full_like(x, math.nan), x) if x.is_floating_point() else x
    return x.cpu().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, part in expected.items():
        assert torch.equal(bits(found[name]), bits(part)), name


@st.composite
def matrices(draw: st.DrawFn, recipe: Recipe) -> Tensor:
    """Values of many magnitudes, with special ones strewn in, and sometimes whole rows that are not finite."""
    shape = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES[1:]))
    if recipe.problem(shape) is not None:
        shape = shape[0], 2 * shape[1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal(shape) * 2.0 ** draw(st.integers(-140, 120))
    if draw(st.booleans()):
        x *= 2.0 ** rng.integers(-30, 4, shape)
    strewn = draw(st.sampled_from([[], SPECIAL, SPECIAL + NOT_FINITE, NOT_FINITE, [0.0]]))
    if strewn:
        x = np.where(rng.random(shape) < draw(st.sampled_from([0.01, 0.3, 1.0])), rng.choice(strewn, shape), x)
    if shape[0] and draw(st.booleans()):
        x[rng.integers(shape[0])] = draw(st.sampled_from([*NOT_FINITE, 0.0, 1e-40]))
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.astype(np.float32))


@st.composite
def fractions(draw: st.DrawFn, x: Tensor) -> Fractions | None:
    if not x.numel() or draw(st.booleans()):
        return None
    inner = draw(st.sampled_from([x.numel(), x.shape[1]]))
    offset = draw(st.sampled_from([0, 3, 8, 2**35 - 128, 2**40 + 16]))
    geometry = Geometry(x.numel(), offset, inner, inner + draw(st.sampled_from([0, 5, 64])), 0)
    return Fractions(draw(st.integers(0, MASK32)), geometry, draw(st.integers(0, 2**33)))


recipe_of = pytest.mark.parametrize("recipe", ALL, ids=str)


def reference(recipe: Recipe, x: Tensor, given: Fractions | None = None) -> dict[str, Tensor]:
    components = recipe.empty(tuple(x.shape), x.device)
    recipe.rescale(components, recipe.absmax(x) if recipe.scales_whole_tensor else None, None, advance=True)
    recipe.encode(x, components, None if given is None else given.tensor(x.device))
    return components


def encoded(
    recipe: Recipe, xs: list[Tensor], given: list[Fractions | None], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Tensor]]:
    parts = [recipe.empty(tuple(x.shape), x.device) for x in xs]
    weights = [Encoding(recipe, part, x, each) for part, x, each in zip(parts, xs, given, strict=True)]
    with engine_alone(monkeypatch):
        absmax = quantizer.absmax([recipe] * len(xs), xs, xs[0].device).split(1)
        quantizer.Scales([weight[:2] for weight in weights]).rescale(absmax, None, advance=True)
        quantizer.encode(weights)
    return parts


@recipe_of
@given(st.data())
def test_codes_and_scales_are_the_references(
    recipe: Recipe, engine: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    xs = [data.draw(matrices(recipe)).to(engine) for _ in range(data.draw(st.integers(1, 3)))]
    given_ = [data.draw(fractions(x)) for x in xs]
    if engine == "cuda" or data.draw(st.booleans()):  # the device counts the steps
        given_ = [f and replace(f, step=torch.tensor(f.step, device=engine)) for f in given_]
    for found, x, each in zip(encoded(recipe, xs, given_, monkeypatch), xs, given_, strict=True):
        assert_same(found, reference(recipe, x, each))


@recipe_of
@given(st.data())
def test_decoded_values_are_the_references(
    recipe: Recipe, engine: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    x = data.draw(matrices(recipe)).to(engine)
    components = reference(recipe, x)
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    for part in components.values():  # every code, also those that no encoder gives
        if part.dtype == torch.uint8 and data.draw(st.booleans()):
            part.copy_(torch.randint(0, 256, part.shape, generator=rng, dtype=torch.uint8))
    dtype = data.draw(st.sampled_from(DTYPES))
    expected = recipe.decode(components, tuple(x.shape)).to(dtype)
    with engine_alone(monkeypatch):
        found = decode(recipe, components, x, dtype)
    assert found.shape == expected.shape and found.dtype == dtype
    assert torch.equal(bits(found), bits(expected))


@recipe_of
@pytest.mark.parametrize("shape", [(130, 1160), (1, 40008), (513, 256)], ids=str)
def test_large_weights_are_decoded(
    recipe: Recipe, shape: tuple[int, int], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By many thread blocks and threads, in groups of 8 elements that end within a block of the format or with it."""
    x = torch.randn(shape, device=engine)
    components = reference(recipe, x)
    with engine_alone(monkeypatch):
        found = decode(recipe, components, x, torch.float16)
    assert torch.equal(bits(found), bits(recipe.decode(components, shape).half()))


def decode(recipe: Recipe, components: dict[str, Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return quantizer.decode(recipe, components, tuple(like.shape), dtype)


def neighbourhood(values: list[float]) -> Tensor:
    """The values, the FP32 numbers beside each, and all of them negative."""
    x = torch.tensor(values)
    x = torch.cat([x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(0.0))])
    return torch.cat([x, -x])


def float8_ties() -> list[float]:
    levels = elements.float8_decode(torch.arange(0x7F, dtype=torch.uint8)).tolist()
    return [(a + b) / 2 for a, b in itertools.pairwise(levels)] + levels


def float4_ties() -> list[float]:
    levels = elements.FLOAT4_LEVELS
    return [(a + b) / 2 for a, b in itertools.pairwise(levels)] + list(levels)


@recipe_of
@pytest.mark.parametrize("power", [-100, 0, 60])
def test_ties_round_to_even(recipe: Recipe, power: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block's scale is a power of two, so that ties of elements are ties of values."""
    top, ties = (6.0, float4_ties()) if isinstance(recipe, NVFP4BlockScaling) else (448.0, float8_ties())
    x = neighbourhood(ties).clamp(-top, top)
    x = torch.nn.functional.pad(x, (0, -x.numel() % 15)).view(-1, 15)
    x = torch.cat([torch.full((len(x), 1), top), x], dim=1).view(1, -1)
    if isinstance(recipe, NVFP4BlockScaling):
        x = torch.cat([torch.full((1, 16), 6.0 * 448.0), x], dim=1)
    x = (x * 2.0**power).to(engine)
    found = encoded(recipe, [x], [None], monkeypatch)[0]
    expected = reference(recipe, x)
    assert_same(found, expected)
    assert found["data"].unique().numel() >= (238 if top == 448.0 else 25)


@recipe_of
@pytest.mark.parametrize("target", [0, 1, 2**31 - 1, 2**31, MASK32 - 1, MASK32])
def test_extreme_fractions(recipe: Recipe, target: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step gives all elements of column 1 the wanted fraction; their values surround each level."""
    float4 = isinstance(recipe, NVFP4BlockScaling)
    top, ties = (6.0, float4_ties()) if float4 else (448.0, float8_ties())
    near = [level + d for level in elements.FLOAT4_LEVELS[:-1] for d in (2.0**-33, 2.0**-32, 2.0**-31)]
    values = neighbourhood([*ties, *(near if float4 else [2.0**-40, 2.0**-33])]).clamp(-top, top)
    geometry = Geometry(32 * len(values), 0, 32, 0, 0)  # every row has the same indices
    first = int(Fractions(7, geometry, 0).tensor(torch.device("cpu"))[1])
    chosen = Fractions(7, geometry, (target - first) * pow(GOLDEN_RATIO, -1, 2**32) & MASK32)
    assert (chosen.tensor(torch.device("cpu"))[1::32] == target).all()
    x = torch.zeros(len(values), 32)
    x[:, 0], x[:, 1], x[:, 16] = top, values, 6.0 * 448.0 if float4 else 0.0
    x = x.to(engine)
    assert_same(encoded(recipe, [x], [chosen], monkeypatch)[0], reference(recipe, x, chosen))


@given(st.data())
def test_absmax_of_many(engine: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    recipe = Float8CurrentScaling()
    xs: list[Tensor | None] = [data.draw(st.none() | matrices(recipe)) for _ in range(data.draw(st.integers(1, 5)))]
    xs = [None if x is None else x.flatten()[data.draw(st.integers(0, 3)) :].to(engine) for x in xs]  # any alignment
    expected = [0.0 if x is None else float(recipe.absmax(x)) for x in xs]
    with engine_alone(monkeypatch):
        found = absmax_of(xs, engine)
    assert found == expected


def absmax_of(xs: list[Tensor | None], device: str) -> list[float]:
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return quantizer.absmax([Float8CurrentScaling()] * len(xs), xs, where).tolist()


def test_more_weights_than_fit_into_one_table(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = NVFP4BlockScaling()
    xs = list(torch.randn(2000, 1, 16).mul_(torch.arange(1, 2001).view(-1, 1, 1)).to(engine).unbind())
    for found, x in zip(encoded(recipe, xs, [None] * len(xs), monkeypatch), xs, strict=True):
        assert_same(found, reference(recipe, x))


@pytest.mark.parametrize("recipe, columns, offset", pairwise(ALL, [256, 260], [1, 2, 3, 4]), ids=str)  # not the product
def test_addresses_that_are_not_aligned(
    recipe: Recipe, offset: int, columns: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3 * columns + offset, device=engine)[offset:].view(3, columns)
    data_shape = recipe.empty((3, columns), x.device)["data"].shape
    components = recipe.empty((3, columns), x.device)
    memory = torch.zeros(data_shape.numel() + offset, dtype=torch.uint8, device=engine)
    components["data"] = memory[offset:].view(data_shape)
    expected = reference(recipe, x)
    with engine_alone(monkeypatch):
        write(recipe, components, x)
        found = decode(recipe, components, x, torch.bfloat16)
    assert_same(components, expected)
    assert torch.equal(bits(found), bits(recipe.decode(expected, (3, columns)).bfloat16()))
    assert not memory[:offset].any()


def write(recipe: Recipe, components: dict[str, Tensor], x: Tensor) -> None:
    weight = Encoding(recipe, components, x)
    quantizer.Scales([weight[:2]]).rescale([quantizer.absmax([recipe], [x], x.device)], None, advance=True)
    quantizer.encode([weight])


@recipe_of
def test_threads_do_not_change_bits(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    if load_engine("cpu")[0] is None:
        pytest.skip("no cpu engine")
    x = torch.randn(1030, 640) * torch.randn(1030, 1).exp()
    expected = reference(recipe, x)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert_same(encoded(recipe, [x], [None], monkeypatch)[0], expected)
        with engine_alone(monkeypatch):
            values = decode(recipe, expected, x, torch.float32)
        assert torch.equal(values, recipe.decode(expected, tuple(x.shape)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or load_engine("cuda")[0] is None, reason="no GPU or no engine")
@recipe_of
def test_cuda_graphs_hold_it(recipe: Recipe) -> None:
    """A replay takes the values and the step's number that are there then."""
    x, steps = torch.randn(130, 260, device="cuda"), torch.tensor(3, device="cuda")
    components, chosen = recipe.empty((130, 260), x.device), Fractions(5, Geometry(33800, 8, 260, 520, 0), steps)

    def run() -> None:
        weight = Encoding(recipe, components, x, chosen)
        quantizer.Scales([weight[:2]]).rescale([quantizer.absmax([recipe], [x], x.device)], None, advance=True)
        quantizer.encode([weight])

    run()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    x.normal_(std=3.0)
    steps.fill_(2**32 + 9)
    for part in components.values():
        part.zero_()
    graph.replay()
    assert_same(components, reference(recipe, x, replace(chosen, step=2**32 + 9)))


# --- scales of whole weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [recipe for recipe in ALL if recipe.scales_whole_tensor], ids=str)
@given(st.data())
def test_tensor_scales_over_many_updates(
    recipe: Recipe, engine: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    ours, theirs = (recipe.empty((2, 2), torch.device(engine)) for _ in range(2))
    number = st.sampled_from([0.0, 1e-45, 1e-38, 3e38]) | st.floats(0.0, 1e6, width=32)
    for _ in range(data.draw(st.integers(1, 6))):
        absmax = torch.tensor(data.draw(number), device=engine)
        applies = data.draw(st.sampled_from([None, True, False]))
        applies = None if applies is None else torch.tensor(applies, device=engine)
        advance = data.draw(st.booleans())
        if advance and data.draw(st.booleans()):
            recipe.prepare(theirs, applies)
            with engine_alone(monkeypatch):
                quantizer.Scales([(recipe, ours)]).prepare(applies)
        recipe.rescale(theirs, absmax, applies, advance)
        with engine_alone(monkeypatch):
            quantizer.Scales([(recipe, ours)]).rescale([absmax.reshape(1)], applies, advance)
        assert_same(ours, theirs)


@pytest.mark.parametrize("recipe", [recipe for recipe in ALL if recipe.scales_whole_tensor], ids=str)
@given(st.data())
def test_any_tensor_scale(recipe: Recipe, engine: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Delayed scales, and scales that stay when a step is skipped, need not suit the values; 0 is that of new ones."""
    x = data.draw(matrices(recipe)).to(engine)
    scale = data.draw(st.sampled_from([0.0, 1e-45, 2.0**-126, 1.0, 1e30]) | st.floats(2.0**-126, 2.0**100, width=32))
    ours, theirs = (recipe.empty(tuple(x.shape), x.device) for _ in range(2))
    for part in (ours, theirs):
        part["tensor_scale"].fill_(scale)
    given_ = data.draw(fractions(x))
    recipe.encode(x, theirs, None if given_ is None else given_.tensor(x.device))
    with engine_alone(monkeypatch):
        encode(recipe, ours, x, given_)
    assert_same(ours, theirs)


def encode(recipe: Recipe, components: dict[str, Tensor], x: Tensor, given_: Fractions | None) -> None:
    quantizer.encode([Encoding(recipe, components, x, given_)])


# --- independent decoders ---------------------------------------------------------------------------------------


def float8_value(code: int) -> float:
    """OCP 8-bit Floating Point Specification 1.0, E4M3: bias 7, no infinities, NaN is S.1111.111."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if exponent == 0xF and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


FLOAT8_VALUES = np.array([float8_value(code) for code in range(256)])
# OCP Microscaling Formats 1.0: E2M1 has bias 1; E8M0 is 2 ** (code - 127), 255 is NaN.
FLOAT4_VALUES = np.array([s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
FLOAT8_SCALES = np.array([2.0 ** (code - 127) for code in range(255)] + [math.nan])


def test_mxfp8_by_the_specification(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 96) * torch.randn(8, 96).exp()
    for recipe in (MXFP8BlockScaling(round_up=False), MXFP8BlockScaling()):
        parts = encoded(recipe, [x.to(engine)], [None], monkeypatch)[0]
        scale = FLOAT8_SCALES[parts["scale"].cpu().numpy()].repeat(32, axis=1)
        values = FLOAT8_VALUES[parts["data"].cpu().numpy()] * scale
        assert np.array_equal(decode(recipe, parts, x, torch.float32).cpu().numpy(), values)
        absmax = np.abs(x.numpy()).reshape(8, 3, 32).max(2)
        floor = 2.0 ** (np.floor(np.log2(absmax)) - 8)
        if recipe.round_up:
            assert np.array_equal(scale[:, ::32], np.where(absmax <= 448 * floor, floor, 2 * floor))
        else:
            assert np.array_equal(scale[:, ::32], floor)
        unsaturated = np.abs(x.numpy()) <= 448 * scale
        error = np.abs(values - x.numpy())[unsaturated]
        assert (error <= np.maximum(np.abs(x.numpy()) / 16, scale * 2.0**-10)[unsaturated]).all()


def test_nvfp4_by_its_definition(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, recipe = torch.randn(8, 96), NVFP4BlockScaling()
    parts = encoded(recipe, [x.to(engine)], [None], monkeypatch)[0]
    data, whole = parts["data"].cpu().numpy(), float(parts["tensor_scale"])
    codes = np.stack([data & 0xF, data >> 4], axis=2).reshape(8, 96)  # the first element in the low half
    scale = (FLOAT8_VALUES[parts["scale"].cpu().numpy()] * whole).astype(np.float32).repeat(16, axis=1)
    values = (FLOAT4_VALUES[codes] * scale).astype(np.float32)
    assert np.array_equal(decode(recipe, parts, x, torch.float32).cpu().numpy(), values)
    assert whole == np.float32(float(x.abs().max()) / (6 * 448)).item()
    absmax = np.abs(x.numpy()).reshape(8, 6, 16).max(2)
    assert np.abs(scale[:, ::16] * 6 / absmax - 1).max() <= 2.0**-4
    assert (np.abs(values - x.numpy()) <= scale * 1.26).all()


# --- where it is used -------------------------------------------------------------------------------------------


@recipe_of
@pytest.mark.parametrize("masters", [True, False])
def test_a_step_gives_the_bits_of_the_reference(
    recipe: Recipe,
    masters: bool,
    engine: str,
    use_backend: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for backend in ("torch", engine):
        use_backend(backend)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(48, 144), nn.Linear(144, 34)).to(engine)
        quantize_model_(model, recipe)
        optimizer = FusedAdam(model.parameters(), lr=1e-2, master_bits=32 if masters else 0)
        optimizer.initialize_state()
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.full(param.shape, 0.1 * (step - 1), device=engine)
            if backend == engine:
                with engine_alone(monkeypatch):
                    optimizer.step()
            else:
                optimizer.step()
        results.append([dict(layer.weight.components) for layer in model])
    for expected, found in zip(*results, strict=True):
        assert_same(found, expected)


@recipe_of
def test_tensors_use_the_engine(recipe: Recipe, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16, device=engine)
    expected = reference(recipe, x.float())
    with engine_alone(monkeypatch):
        tensor = QuantizedTensor.from_values(x, recipe)
        plain, values = tensor.dequantize(), tensor.values()
    assert_same(tensor.components, expected)
    assert torch.equal(values, recipe.decode(expected, (64, 64))) and torch.equal(plain, values.bfloat16())


def test_a_forced_reference_is_used(device: str, use_backend: Callable[[str], None]) -> None:
    components = reference(MXFP8BlockScaling(), torch.randn(2, 32, device=device))
    use_backend("torch")

    class Spy(MXFP8BlockScaling):
        def decode(self, *_: object) -> Tensor:
            raise KeyError

    with pytest.raises(KeyError):
        quantizer.decode(Spy(), components, (2, 32), torch.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": 5}, "known format"),
        ({"data": [0]}, "addresses"),
        ({"tensor_scales": [0]}, "addresses"),
        ({"columns": [3]}, "even"),
        ({"rows": [2**32], "columns": [2**32]}, "elements"),
        ({"scales": [64, 64]}, "one length"),
        ({"columns": []}, "one length"),
        ({"roundings": [(0,) * 6] * 2}, "one length"),
    ],
)
def test_bad_tables_are_refused(engine: str, change: dict[str, object], message: str) -> None:
    module, _ = load_engine(engine)
    table = {name: [64] for name in ("values", "data", "scales", "tensor_scales")} | {"rows": [2], "columns": [2]}
    table |= {"roundings": [], "format": 4, "round_up": False}
    table |= change
    where = run_on(torch.device("cuda", 0) if engine == "cuda" else torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        module.quantize_encode(**table, **where)
