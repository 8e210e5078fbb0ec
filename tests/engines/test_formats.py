"""State formats and masters: codes, error bounds and rounding, against NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cases import BLOCKS, FORMAT, FORMATS, SCALED_FORMATS, STATES, Format, Moment
from fused_optim.formats import elements, masters, rounding, states
from fused_optim.formats.states import Kind
from pairwise import pairwise
from peers import FusedAdam
from reference import (
    GOLDEN_RATIO,
    MASK32,
    NEAREST,
    SMALLEST,
    Array,
    BlockCode,
    Float16Code,
    last_place,
    rounding_fraction,
    rounding_fractions,
)

pytestmark = pytest.mark.filterwarnings("error")
KINDS = {"exp_avg": Kind.SIGNED, "exp_avg_sq": Kind.SQUARE, "master_param": Kind.MASTER}
ALL_STATES = pytest.mark.parametrize("state", STATES)
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS, ids=str)
ALL_SCALED = pytest.mark.parametrize("fmt", SCALED_FORMATS, ids=str)


@dataclass(frozen=True)
class Numbers:
    """FP32 numbers of magnitudes 2**smallest to 2**largest, in blocks of which the last is short."""

    block: int
    count: int
    center: float  # of their exponents
    spread: float
    zeros: float  # their part
    seed: int
    smallest: float
    largest: float

    def array(self, state: str = "exp_avg") -> Array:
        rng = np.random.default_rng(self.seed)
        exponents = np.clip(self.center + self.spread * rng.standard_normal(self.count), self.smallest, self.largest)
        x = (np.exp2(exponents) * (rng.random(self.count) >= self.zeros)).astype(np.float32)
        return x if state == "exp_avg_sq" else x * rng.choice([-1, 1], self.count).astype(np.float32)


@dataclass(frozen=True)
class Fractions:
    """Rounding fractions: a constant, or random ones."""

    constant: int | None
    seed: int

    def array(self, count: int) -> Array:
        if self.constant is not None:
            return np.full(count, self.constant)
        return np.random.default_rng(self.seed).integers(0, 2**32, count)


seeds = st.integers(0, MASK32)
fractions = st.builds(Fractions, st.sampled_from([None, 0, 1, NEAREST, MASK32]), seeds)


def numbers(smallest: float = -149, largest: float = 125) -> st.SearchStrategy[Numbers]:
    return st.builds(
        Numbers,
        block=st.sampled_from(BLOCKS),
        count=st.integers(1, 400),
        center=st.floats(smallest, largest),
        spread=st.sampled_from([0.0, 1.0, 5.0, 20.0, 80.0]),
        zeros=st.sampled_from([0.0, 0.5, 0.95]),
        seed=seeds,
        smallest=st.just(smallest),
        largest=st.just(largest),
    )


def encode(
    x: Array, state: str, fmt: Format, block: int, u: Array | int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stored bits and scales."""
    fractions = torch.from_numpy(np.broadcast_to(u, x.shape).astype(np.int64)).to(device)
    source = torch.from_numpy(x.copy()).to(device)
    bits, scale = states.encode_state(source, KINDS[state], states.STATE_FORMATS[fmt.dtype], block, fractions)
    return bits, scale


def round_trip(x: Array, state: str, fmt: Format, block: int, u: Array | int, device: str) -> Array:
    bits, scale = encode(x, state, fmt, block, u, device)
    return states.decode_state(bits, scale, KINDS[state], states.STATE_FORMATS[fmt.dtype], block).cpu().numpy()


def block_maxima(x: Array, block: int) -> Array:
    """The largest magnitude of each element's block."""
    padded = np.pad(np.abs(x), (0, -len(x) % block)).reshape(-1, block)
    return padded.max(1).repeat(block)[: len(x)]


def scale_maxima(x: Array, state: str, code: BlockCode, block: int, u: Array) -> Array:
    """What the scale of each element's block follows from."""
    maxima = block_maxima(x, block)
    return np.where(maxima < SMALLEST[state], maxima, block_maxima(code.rounded(np.abs(x), u), block))


def codes_of(bits: torch.Tensor) -> Array:
    """Magnitudes of stored codes."""
    if bits.dtype == torch.int8:
        return np.abs(bits.cpu().numpy().astype(np.int64))
    kind = np.uint8 if bits.dtype == torch.uint8 else np.uint16
    return bits.cpu().contiguous().view(torch.uint8).numpy().view(kind).astype(np.int64)


def magnitudes_of(bits: torch.Tensor, state: str) -> Array:
    """As ``codes_of``, without the sign bit that exp_avg's codes may have."""
    signed = state == "exp_avg" and bits.dtype != torch.int8
    return codes_of(bits) & ((1 << 8 * bits.element_size() - 1) - 1) if signed else codes_of(bits)


# --- what holds for every format ------------------------------------------------------------------------------------


@ALL_STATES
@ALL_FORMATS
@given(data=numbers(largest=127))
def test_decoded_values_are_stored_exactly(fmt: Format, state: str, device: str, data: Numbers) -> None:
    x, block = data.array(state), data.block
    decoded = round_trip(x, state, fmt, block, NEAREST, device)
    np.testing.assert_array_equal(round_trip(decoded, state, fmt, block, NEAREST, device), decoded)


@ALL_STATES
@ALL_FORMATS
@given(data=numbers(), u=fractions)
def test_errors_are_bounded(fmt: Format, state: str, device: str, data: Numbers, u: Fractions) -> None:
    x, block = data.array(state), data.block
    moment = fmt.moment(state)
    rotating = round_trip(x, state, fmt, block, u.array(data.count), device)
    _assert_close(rotating, x, block, state, moment, steps=2.0)
    nearest = round_trip(x, state, fmt, block, NEAREST, device)
    _assert_close(nearest, x, block, state, moment, steps=1.0)


def _assert_close(decoded: Array, x: Array, block: int, state: str, moment: Moment, steps: float) -> None:
    maxima = block_maxima(x, block)
    kept = maxima >= SMALLEST[state] if moment.absolute else np.ones(len(x), bool)
    np.testing.assert_array_equal(decoded[~kept], 0)
    np.testing.assert_array_equal(decoded[x == 0], 0)
    np.testing.assert_array_equal(np.signbit(decoded[decoded != 0]), np.signbit(x[decoded != 0]))
    code = moment.code
    largest = np.maximum(maxima, (code.levels[-1] * code.smallest_scale) ** code.root)  # what a scale's floor is for
    root = code.coded(np.abs(x), largest)
    relative = steps * moment.relative * root
    unit = 2.0 * moment.absolute * code.coded(largest, largest)  # of codes
    # Below code 1 exp_avg_sq's values become it, however they are rounded; others may go by the value, not by its root.
    coarse = (root < unit) & (state == "exp_avg_sq" or code.fades_by_value)
    absolute = np.where(coarse, 1.0, steps / 2.0) * unit
    # Roots are nudged up before they are rounded, int8's codes have 15 binary places until then; BF16 has denormals.
    arithmetic = (float(code.nudge) - 1.0 + 2.0**-21) * root
    bound = (relative + absolute) * (1 + 2.0**-14) + arithmetic + (0.0 if moment.absolute else 2.0**-133)
    lowest = code.value(np.maximum(root - bound, 0.0), largest) - 2.0**-149  # powers of roots end in FP32's denormals
    highest = code.value(root + bound, largest) + 2.0**-149
    magnitudes = np.abs(decoded.astype(np.float64))
    assert np.all(((lowest <= magnitudes) & (magnitudes <= highest))[kept])


@ALL_STATES
@ALL_SCALED
def test_largest_numbers_saturate(fmt: Format, state: str, device: str) -> None:
    """Nothing becomes zero or infinite."""
    x = np.exp2(np.linspace(120, 127.99, 256), dtype=np.float64).astype(np.float32)
    if fmt.dtype == torch.float16:  # of the others' roots, the very largest may round up
        x[-1] = np.finfo(np.float32).max
    for u in (0, NEAREST, MASK32):
        decoded = round_trip(x, state, fmt, 128, u, device)
        assert np.all(np.isfinite(decoded))
        error = 2.0**-11 if fmt.dtype == torch.float16 else 0.15
        np.testing.assert_allclose(decoded, x, rtol=error if u == NEAREST else 2 * error)


@pytest.mark.parametrize("state, fmt, block", pairwise(STATES, FORMATS, BLOCKS), ids=str)  # not the product: each two
def test_poison_stays_in_its_block(fmt: Format, state: str, device: str, block: int) -> None:
    x = np.random.default_rng(0).standard_normal(3 * block + 5).astype(np.float32)
    x = np.abs(x) if state == "exp_avg_sq" else x
    clean = round_trip(x, state, fmt, block, NEAREST, device)
    hit = slice(block, 2 * block) if fmt.scaled else slice(block + 7, block + 8)
    for poison in (np.nan, np.inf, -np.inf)[: 2 if state == "exp_avg_sq" else 3]:
        x[block + 7] = poison
        decoded = round_trip(x, state, fmt, block, NEAREST, device)
        assert not np.isfinite(decoded[block + 7])
        decoded[hit] = clean[hit]
        np.testing.assert_array_equal(decoded, clean)


# --- rotating rounding of moments ------------------------------------------------------------------------


@ALL_FORMATS
@given(data=numbers(smallest=-120), u=fractions)
def test_second_moment_keeps_updates_bounded(fmt: Format, device: str, data: Numbers, u: Fractions) -> None:
    """A positive value never becomes zero, nor so small that an update grows by more than the format's bound."""
    v, block = data.array("exp_avg_sq"), data.block
    decoded = round_trip(v, "exp_avg_sq", fmt, block, u.array(data.count), device)
    positive = v > 0
    assert np.all(decoded[positive] > 0)
    enlarged = np.sqrt(v[positive].astype(np.float64) / decoded[positive])
    assert np.all(enlarged <= fmt.largest_update * (1 + 2.0**-18))
    within = block_maxima(v, block)[positive] / v[positive].astype(np.float64)
    assert np.all(enlarged[within <= 1e8] <= 1.251) and np.all(enlarged[within <= 1e14] <= 2.001)


# --- codes against NumPy ----------------------------------------------------------------------------------------------


@ALL_STATES
@ALL_SCALED
@given(data=numbers(), u=fractions)
def test_moments_equal_numpy(fmt: Format, state: str, device: str, data: Numbers, u: Fractions) -> None:
    x, block = data.array(state), data.block
    fraction = u.array(data.count)
    bits, scale = encode(x, state, fmt, block, fraction, device)
    code = fmt.moment(state).code
    scales = code.scale(scale_maxima(x, state, code, block, fraction), state)
    np.testing.assert_array_equal(scale.cpu().numpy(), scales[::block])
    codes = magnitudes_of(bits, state)
    position = code.position(np.abs(x), scales) + fraction / 2**32
    fuzz = 2.0**-10  # the fraction's last bits are dropped
    least = (x > 0) & (scales > 0) if state == "exp_avg_sq" else 0
    lowest, highest = (np.floor(position + sign * fuzz).clip(least, len(code.levels) - 1) for sign in (-1, 1))
    highest = np.where(scales > 0, highest, 0)
    assert np.all((lowest <= codes) & (codes <= highest))
    decoded = round_trip(x, state, fmt, block, fraction, device)
    np.testing.assert_array_equal(decoded, np.copysign(code.decode(codes, scales), x))


@ALL_STATES
@given(data=numbers(largest=127), u=fractions)
def test_rotating_fp16_values_are_loaded_exactly(state: str, device: str, data: Numbers, u: Fractions) -> None:
    """What a step has stored comes back through FP32 values and nearest rounding, scales included."""
    fmt, block = states.STATE_FORMATS[torch.float16], data.block
    x = data.array(state)
    x[::block] *= np.float32(1 + 2.0**-12)  # many of the largest are just above a power of two
    bits, scale = encode(x, state, FORMAT["float16"], block, u.array(data.count), device)
    stored = states.decode_state(bits, scale, KINDS[state], fmt, block)
    again, scale_again = encode(stored.cpu().numpy(), state, FORMAT["float16"], block, NEAREST, device)
    assert torch.equal(again, bits) and torch.equal(scale_again, scale)


def test_the_largest_fp16_second_moment_grows_through_powers_of_two(device: str) -> None:
    """Where a scale ends, too, an average that grows by less than a last place per step is not held back."""
    fmt, v = states.STATE_FORMATS[torch.float16], np.float32(0.9)
    state = torch.full((32,), float(v), device=device)
    for step in range(1, 2001):
        u = torch.from_numpy(rounding_fractions(0, 0, 32, step)).to(device)
        bits, scale = states.encode_state(state * 0.999 + 0.0013, Kind.SQUARE, fmt, 32, u)
        state = states.decode_state(bits, scale, Kind.SQUARE, fmt, 32)
    np.testing.assert_allclose(state.cpu().numpy(), 1.3 - 0.4 * 0.999**2000, rtol=2e-3)


@given(data=numbers(largest=127), u=fractions)
def test_fp16_masters_equal_numpy(device: str, data: Numbers, u: Fractions) -> None:
    x, block, fraction = data.array(), data.block, u.array(data.count)
    fmt = states.STATE_FORMATS[torch.float16]
    bits, scale = encode(x, "master_param", FORMAT["float16"], block, fraction, device)
    code = Float16Code()
    scales = code.scale(scale_maxima(x, "master_param", code, block, fraction), "master_param")
    np.testing.assert_array_equal(scale.cpu().numpy(), scales[::block])
    codes = magnitudes_of(bits, "exp_avg")
    position = code.position(np.abs(x), scales) + fraction / 2**32
    fuzz = 2.0**-10  # the fraction's last bits are dropped
    lowest, highest = (np.floor(position + sign * fuzz).clip(0, len(code.levels) - 1) for sign in (-1, 1))
    lowest, highest = (np.where(scales > 0, bound, 0) for bound in (lowest, highest))
    assert np.all((lowest <= codes) & (codes <= highest))
    decoded = states.decode_state(bits, scale, Kind.MASTER, fmt, block)
    np.testing.assert_array_equal(decoded.cpu().numpy(), np.copysign(code.decode(codes, scales), x))
    again, scale_again = encode(decoded.cpu().numpy(), "master_param", FORMAT["float16"], block, NEAREST, device)
    assert torch.equal(again, bits) and torch.equal(scale_again, scale)


@pytest.mark.parametrize("lr", [0.0091, 0.9993])  # a third of a last place off the grid
def test_large_updates_round_fp16_masters_to_nearest(lr: float, device: str) -> None:
    """Half a unit of the last place off at most, where an update is two units or more; whole blocks and short ends."""
    for shape in [(8, 128), (9, 96), (4099,)]:
        start = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 2.0 + lr  # updates end in [2, 4)
        param = start.half().to(device)
        expected = param.float().requires_grad_()
        optimizer = FusedAdam([param], lr=lr, master_weight_dtype=torch.float16)
        reference = torch.optim.Adam([expected], lr=lr)
        param.grad, expected.grad = torch.ones_like(param), torch.ones_like(expected)
        optimizer.step()
        reference.step()
        error = (optimizer.get_unscaled_state(param, "master_param") - expected.detach()).abs()
        assert 2.0**-11 < float(error.max()) < 2.0**-10


def test_float8_codes_equal_torch_cast(device: str) -> None:
    """But for values between two codes, which round up and not to even."""
    x = (torch.arange(2**20, dtype=torch.int32) << 12).view(torch.float32)  # every exponent, 12 leading mantissa bits
    x = torch.cat([x, -x])[x.isfinite().repeat(2)].clamp(-448, 448).to(device)
    x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    x = torch.nn.functional.pad(x, (0, 1), value=448.0)  # so every scale is 1
    u = torch.full((x.numel(),), NEAREST, device=device)
    bits, scale = states.encode_state(x, Kind.SIGNED, states.STATE_FORMATS[torch.float8_e4m3fn], 128, u)
    assert torch.equal(scale, torch.ones_like(scale))
    cast = x.to(torch.float8_e4m3fn)
    is_tie = (x - cast.float()).abs() * 2 == (cast.view(torch.uint8) + 1).view(torch.float8_e4m3fn).float().sub(
        cast.float()
    ).abs()
    up = torch.where(is_tie & (cast.float().abs() < x.abs()), cast.view(torch.uint8) + 1, cast.view(torch.uint8))
    assert torch.equal(bits, up)


# --- rotating rounding ----------------------------------------------------------------------------------------------


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    index=st.integers(0, 100_000),
    step=st.integers(1, 2**40),
    elements=st.lists(st.integers(0, 2**48), min_size=1, max_size=20),
)
def test_fractions_are_a_weyl_sequence(seed: int, index: int, step: int, elements: list[int]) -> None:
    key = rounding.rounding_key(seed, index)
    bits = rounding.rounding_bits(key, torch.tensor(elements), step * GOLDEN_RATIO & MASK32)
    assert bits.tolist() == [rounding_fraction(seed, index, element, step) for element in elements]


@ALL_STATES
@ALL_FORMATS
def test_rotating_rounding_is_unbiased(fmt: Format, state: str, device: str) -> None:
    """The mean code of a fixed value comes within 1% of a step after 1000 steps; random bits would need 10,000."""
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    x = np.abs(x) if state == "exp_avg_sq" else x
    code = fmt.moment(state).code
    u = torch.from_numpy(rounding_fractions(3, 1, 64, 0)).numpy()
    decoded = np.stack(
        [round_trip(x, state, fmt, 64, (u + step * GOLDEN_RATIO) & MASK32, device) for step in range(1, 1001)]
    ).astype(np.float64)
    assert np.all(np.sign(decoded) * np.sign(x) >= 0)
    largest = np.abs(x).max()
    roots, root = code.coded(np.abs(decoded), largest), code.coded(np.abs(x), largest)
    size = roots.max(0) - roots.min(0)
    assert np.count_nonzero(size) >= (60 if fmt.bytes < 4 else 0)
    assert np.all(np.abs(roots.mean(0) - root) <= 0.01 * size + 2.0**-19 * root)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@given(data=st.data())
def test_rotating_elements_equal_numpy(dtype: torch.dtype, device: str, data: st.DataObject) -> None:
    """Parameters without master: floor(magnitude + u), in units of the last place kept."""
    bits = data.draw(hnp.arrays(np.uint32, 64, elements=st.integers(0, MASK32)))
    u = data.draw(fractions).array(64)
    x = bits.view(np.float32)
    result = elements.ROTATING[dtype](torch.from_numpy(x.copy()).to(device), torch.from_numpy(u).to(device))
    actual = result.float().cpu().numpy()
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(x))
    np.testing.assert_array_equal(actual[np.isinf(x)], x[np.isinf(x)])
    finite = np.isfinite(x)
    x, u, actual = x[finite].astype(np.float64), u[finite], actual[finite]
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(x))
    bits_kept, smallest, dropped = (8, -126, 16) if dtype == torch.bfloat16 else (11, -14, 13)
    unit = last_place(x, bits_kept, smallest)
    position = np.abs(x) / unit + (u >> 32 - dropped) / 2.0**dropped
    fuzz = 0.0 if dtype == torch.bfloat16 else 2.0**-13  # FP16 denormals are rounded twice
    lowest, highest = np.floor(position - fuzz) * unit, np.floor(position + fuzz) * unit
    if dtype == torch.bfloat16:  # finite stays finite
        lowest, highest = (
            np.minimum(lowest, float(torch.finfo(dtype).max)),
            np.minimum(highest, float(torch.finfo(dtype).max)),
        )
    else:
        lowest, highest = (np.where(value >= 65536, np.inf, value) for value in (lowest, highest))
    assert np.all((lowest <= np.abs(actual)) & (np.abs(actual) <= highest))


def test_stored_bits_follow_the_sequence(device: str) -> None:
    """Seed, parameter index, element and step reach the rounding of a step."""
    params = [torch.zeros(3, device=device), torch.zeros(7, 41, device=device)]
    optimizer = FusedAdam(params, exp_avg_sq_dtype=torch.bfloat16, seed=2**40 + 12345)
    beta2, rest = np.float32(0.999), np.float32(1 - 0.999)
    v = np.zeros(287, np.float32)
    rng = np.random.default_rng(1)
    for step in (1, 2, 3):
        grad = rng.standard_normal(287).astype(np.float32)
        params[0].grad, params[1].grad = torch.ones_like(params[0]), torch.from_numpy(grad).view(7, 41).to(device)
        optimizer.step()
        v = beta2 * v + rest * (grad * grad)
        u = rounding_fractions(2**40 + 12345, 1, 287, step)
        v = (((v.view(np.uint32) + (u >> 16)) >> 16) << 16).astype(np.uint32).view(np.float32)
        stored = optimizer.state[params[1]]["exp_avg_sq"].float().cpu().numpy().reshape(-1)
        np.testing.assert_array_equal(stored, v)


def test_parameters_without_master_follow_the_sequence(device: str) -> None:
    weight = torch.linspace(1, 2, 200, device=device).bfloat16()
    before = weight.float().cpu().numpy()
    other = torch.ones(1, device=device)
    optimizer = FusedAdam(
        [other, weight], lr=0.01, weight_decay=0.05, master_bits=0, seed=7, decoupled_weight_decay=True
    )
    other.grad, weight.grad = torch.ones_like(other), torch.zeros_like(weight)  # only weight decay moves the weight
    optimizer.step()
    decayed = before * np.float32(1 - 0.01 * 0.05)
    u = rounding_fractions(7, 1, 200, 1)
    expected = (((decayed.view(np.uint32) + (u >> 16)) >> 16) << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(weight.float().cpu().numpy(), expected)
    assert len(np.unique(expected != before)) == 2  # some were rounded up again, some were not


# --- split masters --------------------------------------------------------------------------------------------------


def split_and_join(master: Array, kind: masters.Master, device: str, u: Array | int = NEAREST) -> tuple[Array, Array]:
    """BF16 parameter and joined master."""
    fractions = torch.from_numpy(np.broadcast_to(u, master.shape).astype(np.int64)).to(device)
    param, remainder = masters.split_remainder(torch.from_numpy(master.copy()).to(device), kind, fractions)
    assert remainder.dtype == kind.dtype
    return param.float().cpu().numpy(), masters.join_remainder(param, remainder).cpu().numpy()


def patterns(device: str) -> Array:
    """FP32 values with every upper half and with lower halves around every rounding boundary."""
    low = np.array(
        [0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0x807F, 0x8080, 0xFF7F, 0xFFFF]
    )
    return (np.arange(2**16)[:, None] << 16 | low).reshape(-1).astype(np.uint32).view(np.float32)


def test_16_bit_remainders_are_lossless(device: str) -> None:
    master = patterns(device)
    param, joined = split_and_join(master, masters.Master.REMAINDER16, device)
    nan = np.isnan(master)
    assert np.all(np.isnan(joined[nan])) and np.all(np.isnan(param[nan]))
    np.testing.assert_array_equal(joined[~nan].view(np.uint32), master[~nan].view(np.uint32))
    half_up = (master.view(np.uint32).astype(np.int64) + 0x8000 >> 16 << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(param[~nan].view(np.uint32), half_up[~nan].view(np.uint32))


def test_8_bit_remainders_are_the_nearest_24_bit_value(device: str) -> None:
    master = patterns(device)
    param, joined = split_and_join(master, masters.Master.REMAINDER8, device)
    nan = np.isnan(master)
    assert np.all(np.isnan(joined[nan])) and np.all(np.isnan(param[nan]))
    usual = np.abs(master) < 2.0**127  # the largest may round to infinity
    master, joined, param = (x[usual].astype(np.float64) for x in (master, joined, param))
    unit = last_place(master, 16, -126)  # BF16's 8 significant bits and 8 more
    assert np.all(np.abs(joined - master) <= unit / 2)
    assert np.all(joined / unit == np.rint(joined / unit))
    assert np.all(np.abs(param - joined) <= 128 * unit)  # the parameter is the master's nearest BF16


@pytest.mark.parametrize("u", [0, 1, NEAREST, MASK32, None])
def test_24_bit_masters_rotate(device: str, u: int | None) -> None:
    """floor(magnitude + u), in units of the last of 16 places; values that have no more stay as they are."""
    rng = np.random.default_rng(0)
    master = rng.integers(0, MASK32, 10_000, np.uint32).view(np.float32)
    master = master[np.abs(master) < 2.0**127].astype(np.float32)
    fraction = rng.integers(0, 2**32, len(master)) if u is None else np.full(len(master), u)
    param, joined = split_and_join(master, masters.Master.REMAINDER8, device, fraction)
    unit = last_place(master, 16, -126)
    places = np.floor(np.abs(master.astype(np.float64)) / unit + (fraction >> 24) / 256)
    np.testing.assert_array_equal(joined, np.copysign(places * unit, master).astype(np.float32))
    again, stays = split_and_join(joined, masters.Master.REMAINDER8, device, rng.integers(0, 2**32, len(master)))
    np.testing.assert_array_equal(stays.view(np.uint32), joined.view(np.uint32))
    np.testing.assert_array_equal(again, param)


SOME16, ALL8 = [-32768, -32767, -1, 0, 1, 77, 32766, 32767], [*range(-128, 128)]


@pytest.mark.parametrize(
    "kind, lows",
    [
        pytest.param(masters.Master.REMAINDER16, SOME16, id="rem16"),
        pytest.param(masters.Master.REMAINDER8, [*ALL8[::16], -1, 1, 77, 126, 127], id="rem8"),
        pytest.param(masters.Master.REMAINDER8, ALL8, id="rem8, all", marks=pytest.mark.long),
    ],
)
def test_any_remainder_joins_any_parameter(kind: masters.Master, lows: list[int], device: str) -> None:
    """Parameters may be written from outside: finite ones stay finite, and the others what they are."""
    high = np.arange(2**16, dtype=np.uint16).repeat(len(lows)).view(np.int16)
    param = torch.from_numpy(high.copy()).to(device).view(torch.bfloat16)
    low = np.tile(np.array(lows), 2**16)
    joined = masters.join_remainder(param, torch.from_numpy(low).to(device, kind.dtype))
    again, _ = masters.split_remainder(joined, kind)
    assert bool((joined.isfinite() | ~param.isfinite()).all())
    assert torch.equal(joined.isnan(), param.isnan())
    number = ~param.isnan()
    assert torch.equal(again.view(torch.int16)[number], param.view(torch.int16)[number])
    # Beside infinity only the remainders of finite masters that round to it mean anything.
    assert torch.equal(joined.isinf(), param.isinf() & (torch.from_numpy(low).to(device) >= 0))


# --- codecs of masters ----------------------------------------------------------------------------------------------

PLACES = {torch.float32: (24, -126, 0), torch.bfloat16: (8, -126, 16), torch.float16: (11, -14, 13)}
SPECIAL = [0, 1, 0x7FFFFF, 0x800000, 0x3F808000, 0x477FF000, 0x7F7F7FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
CODED = [(masters.Master.PARAMETER, dtype) for dtype in PLACES]
CODED += [(kind, dtype) for kind in (masters.Master.FLOAT32, masters.Master.FLOAT16) for dtype in [*PLACES][1:]]
CODED += [(kind, torch.bfloat16) for kind in (masters.Master.REMAINDER16, masters.Master.REMAINDER8)]
any_bits = st.one_of(
    st.integers(0, MASK32),
    st.sampled_from([bits | sign for bits in SPECIAL for sign in (0, 0x80000000)]),
    st.integers(0x3E000000, 0x40FFFFFF),
)


def rounded_places(x: Array, bits: int, smallest: int, dropped: int, u: Array | None) -> Array:
    """``x`` with ``bits`` significant bits, plus ``u`` of ``dropped`` bits and truncated; None: to nearest even."""
    unit = last_place(x, bits, smallest)
    parts = np.rint(np.abs(x.astype(np.float64)) / unit * 2.0**dropped)
    places = np.rint(parts / 2.0**dropped) if u is None else np.floor((parts + (u >> 32 - dropped)) / 2.0**dropped)
    return np.copysign(places * unit, x)


@np.errstate(all="ignore")  # infinities and NaN
def written_master(kind: masters.Master, dtype: torch.dtype, x: Array, u: Array | None) -> tuple[Array, Array]:
    """Master and parameter, FP32."""
    largest, nearest = torch.finfo(dtype).max, np.full(len(x), NEAREST)
    up = nearest if u is None else u
    if kind is masters.Master.REMAINDER8:
        x = rounded_places(x, 16, -126, 8, up).astype(np.float32)
    if kind is masters.Master.FLOAT16:
        scale = Float16Code().scale(scale_maxima(x, "master_param", Float16Code(), 32, up), "master_param")
        units = np.minimum(np.abs(x.astype(np.float64)) / np.where(scale > 0, scale, 1), 65504)
        magnitude = rounded_places(units, *PLACES[torch.float16], up) * scale
        x = np.where(scale > 0, np.copysign(magnitude, x), scale).astype(np.float32)
    is_master = kind is masters.Master.PARAMETER
    param = rounded_places(x, *PLACES[dtype], u if is_master else nearest if kind.is_remainder else None)
    saturated = np.isfinite(x) & (is_master and u is not None and dtype == torch.bfloat16)
    param = np.where(np.abs(param) > largest, np.copysign(np.where(saturated, largest, np.inf), x), param)
    return param if is_master else x, param


def assert_bits(actual: torch.Tensor, expected: Array) -> None:
    found, nan = actual.float().cpu().numpy(), np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("kind, dtype", CODED, ids=str)
@given(
    bits=hnp.arrays(np.uint32, st.integers(1, 100), elements=any_bits),
    u=st.none() | st.builds(Fractions, st.none(), seeds),
)
def test_codecs_of_masters_equal_numpy(
    kind: masters.Master, dtype: torch.dtype, bits: Array, u: Fractions | None, device: str
) -> None:
    """NaN, infinities, subnormal numbers and zeros of both signs among them."""
    count, fractions = len(bits), None if u is None else u.array(len(bits))
    stored = None if kind is masters.Master.PARAMETER else torch.empty(count, dtype=kind.dtype, device=device)
    scale = torch.empty(-(-count // 32), device=device) if kind is masters.Master.FLOAT16 else None
    master = masters.MasterTensors(torch.empty(count, dtype=dtype, device=device), stored, scale, 32)
    value = torch.from_numpy(bits.view(np.float32).copy()).to(device)
    kind.codec.write(master, value, None if fractions is None else torch.from_numpy(fractions).to(device))
    expected, param = written_master(kind, dtype, bits.view(np.float32), fractions)
    assert_bits(kind.codec.read(master), expected)
    assert master.param is not None
    assert_bits(master.param, param)
    kind.codec.write(master, kind.codec.read(master).clone())
    assert_bits(kind.codec.read(master), expected)
    assert_bits(master.param, param)
    kind.codec.seed(master, master.param.float())
    assert_bits(master.param, param)
    assert_bits(kind.codec.read(master), written_master(kind, dtype, param.astype(np.float32), None)[0])
