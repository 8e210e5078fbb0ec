"""Averages and masters of few bits go where FP32's go: inputs that fall silent, rare and wide ones, tiny updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import FORMAT, MASTER, Format, Master, normal
from fused_optim.formats.states import STATE_FORMATS, Kind, decode_state, encode_state
from pairwise import pairwise
from peers import FusedAdamW, FusedLion, FusedMuon
from reference import MASK32

LR = 1e-3
FEW_BITS = [FORMAT[name] for name in ("bfloat16", "float16", "float8_e4m3fn", "int8")]
FEW_MASTERS = [MASTER[name] for name in ("float32", "bfloat16+rem8", "bfloat16", "bfloat16+float16")]
NOISE = 0.0007  # of a learning rate per step


def groups_of(values: Sequence[Tensor], options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of the same parameters."""
    return [{"params": [nn.Parameter(value.clone()) for value in values], **each} for each in options]


def give(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    for group in optimizer.param_groups:
        for param, gradient in zip(group["params"], gradients, strict=True):
            param.grad = gradient.to(param.device, param.dtype)


def positions(optimizer: torch.optim.Optimizer) -> Tensor:
    """Masters in double precision, a row for each group."""
    store = getattr(optimizer, "store", None)
    master = (lambda param: param.detach()) if store is None else store.master
    rows = [torch.cat([master(param).double().flatten() for param in g["params"]]) for g in optimizer.param_groups]
    return torch.stack(rows).cpu()


def unit(master: Master) -> float:
    """The distance of the master's neighbours just above 1."""
    return 2.0 ** (1 - master.bits)


# --- inputs that fall silent ------------------------------------------------------------------------------------------

SHAPES = [(4, 128), (6, 64), (4, 96)]  # blocks of 128, 64 and 32
BETAS = [(0.8, 0.95), (0.8, 0.999), (0.9, 0.95), (0.9, 0.999), (0.95, 0.95), (0.95, 0.99), (0.98, 0.999)]
SPOKEN, SILENT, BACK = 50, 500, 20  # steps with gradients, without, and with gradients again
# Gradients of the inputs beside the silent ones, by step.
OTHERS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "random": lambda step, noise: noise,
    "constant": lambda step, noise: 1.0 + torch.arange(noise.shape[1]) % 7 + 0.0 * noise,
    "turning": lambda step, noise: torch.full_like(noise, (-1.0) ** step),
    "bursts": lambda step, noise: noise * (1000.0 if step % 20 == 0 else 1.0),
    "fading": lambda step, noise: noise * 0.97**step,
}


def silent_columns() -> Tensor:
    """Every second one, of all parameters in a row."""
    return torch.cat([(torch.arange(shape[1]) % 2 == 0).expand(shape).flatten() for shape in SHAPES])


def silent_run(optimizer: torch.optim.Optimizer, others: str) -> dict[str, Tensor]:
    """What the silent columns do, in learning rates: their way while they are silent, that of a step at the end of it,
    and each step's when their gradients have come back."""
    kept = []
    for step in range(SPOKEN + SILENT + BACK):
        if step in (SPOKEN, SPOKEN + SILENT - 50) or step >= SPOKEN + SILENT:
            kept.append(positions(optimizer)[:, silent_columns()] / LR)
        gradients = [normal(shape, 1000 * number + step) for number, shape in enumerate(SHAPES)]
        if SPOKEN <= step < SPOKEN + SILENT:
            gradients = [OTHERS[others](step, gradient) for gradient in gradients]
            for gradient in gradients:
                gradient[:, ::2] = 0.0
        give(optimizer, gradients)
        optimizer.step()
    start, late, end = kept[:3]
    back = torch.stack(kept[2:]).diff(dim=0)
    return {"way": (end - start).abs(), "late": (end - late).abs().mean(1) / 50, "back": back.abs().amax(2)}


@functools.cache
def exact_silent_run() -> dict[str, Tensor]:
    """What the others' gradients are makes no difference to torch."""
    groups = groups_of([torch.ones(shape) for shape in SHAPES], [{"betas": betas} for betas in BETAS])
    return silent_run(torch.optim.AdamW(groups, lr=LR, weight_decay=0.0), "random")


@pytest.mark.parametrize("fmt, master, others", pairwise(FEW_BITS, FEW_MASTERS, [*OTHERS]), ids=str)
def test_silent_inputs_stand_still(fmt: Format, master: Master, others: str, device: str) -> None:
    """Half of each row has no gradients for 500 steps. And updates are of the usual size when they come back."""
    values = [torch.ones(shape, dtype=master.param_dtype, device=device) for shape in SHAPES]
    groups = groups_of(values, [{"betas": betas} for betas in BETAS])
    optimizer = FusedAdamW(groups, lr=LR, weight_decay=0.0, state_dtype=fmt.dtype, **master.options)
    found, exact = silent_run(optimizer, others), exact_silent_run()
    place = unit(master) / LR
    assert bool((found["late"] <= exact["late"] + NOISE).all())
    # Beside constant gradients int8's codes keep their distances to the thresholds: the way with momentum is shorter.
    way = 0.15 if (str(fmt), others) == ("int8", "constant") else 0.1
    assert bool(((found["way"].mean(1) / exact["way"].mean(1) - 1.0).abs() < way).all())
    assert bool((found["way"].amax(1) <= 2.0 * exact["way"].amax(1) + 2 * place).all())
    assert bool((found["back"] <= 2.0 * exact["back"] + place).all())


MOMENTA = (0.8, 0.9, 0.95)
# By the name of an average of gradients: optimizers, and options by which it decays.
AVERAGES: dict[str, tuple[Any, Callable[[float], dict[str, Any]]]] = {
    "exp_avg of AdamW": (FusedAdamW, lambda rate: {"betas": (rate, 0.99)}),
    "exp_avg of Lion": (FusedLion, lambda rate: {"betas": (0.9, rate)}),
    "momentum_buffer of Muon": (FusedMuon, lambda rate: {"momentum": rate}),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("fmt", FEW_BITS, ids=str)
def test_averages_of_every_rule(fmt: Format, average: str, device: str) -> None:
    """A third of the columns falls silent, another turns its sign: stored averages are those in double precision."""
    shape, steps = (8, 96), 550
    silent, turning, usual = (slice(first, None, 3) for first in range(3))
    kind, options_of = AVERAGES[average]
    groups = groups_of([torch.zeros(shape, device=device)], [options_of(rate) for rate in MOMENTA])
    optimizer = kind(groups, lr=LR, weight_decay=0.0, state_dtype=fmt.dtype)
    exact = torch.zeros(len(MOMENTA), *shape, dtype=torch.float64)
    for step in range(steps):
        gradient = normal(shape, step)
        gradient[:, turning] = normal(shape, 10**6)[:, turning] * (1.0 if step < 250 else -1.0)
        if step >= 50:
            gradient[:, silent] = 0.0
        for row, rate in zip(exact, MOMENTA, strict=True):
            row.mul_(rate).add_(gradient.double(), alpha=1.0 - rate)
        give(optimizer, [gradient])
        optimizer.step()
    for group, row in zip(optimizer.param_groups, exact, strict=True):
        stored = optimizer.get_unscaled_state(group["params"][0], average.split()[0]).double().cpu()
        for columns, most in ((turning, 0.05), (usual, 0.1)):
            error = (stored - row)[:, columns].norm() / row[:, columns].norm()
            assert float(error) <= {"bfloat16": 0.01, "float16": 0.001}.get(str(fmt), most)
        assert abs(float((stored / row)[:, turning].mean()) - 1.0) <= 0.005
        assert float(stored[:, silent].abs().max()) <= 1e-10


@pytest.mark.parametrize("fmt, master", pairwise(FEW_BITS, FEW_MASTERS), ids=str)
def test_lion_turns_with_its_gradients(fmt: Format, master: Master, device: str) -> None:
    """Their signs change after 200 steps, but for one of each block, which keeps its scale where it is.

    Gradients of a block span two powers of ten.
    """
    options, shape = [{"betas": betas} for betas in ((0.9, 0.95), (0.9, 0.99), (0.95, 0.98), (0.8, 0.9))], (8, 128)
    sizes, turning = 10.0 ** -(2.0 * normal(shape, 0).sigmoid()), torch.arange(shape[1]) > 0
    values = torch.ones(shape, dtype=master.param_dtype, device=device)
    kept: dict[str, Any] = {"lr": LR, "weight_decay": 0.0}
    ours = FusedLion(groups_of([values], options), **kept, state_dtype=fmt.dtype, **master.options)
    exact = FusedLion(groups_of([torch.ones(shape)], options), **kept)
    for step in range(600):
        for optimizer in (ours, exact):
            give(optimizer, [torch.where(turning, sizes if step < 200 else -sizes, 1.0)])
            optimizer.step()
    way, wanted = ((positions(each)[:, turning.expand(shape).flatten()] - 1.0) / LR for each in (ours, exact))
    assert bool((wanted > 90.0).all())
    assert bool(((way.mean(1) / wanted.mean(1) - 1.0).abs() < 0.06).all())
    assert float((way - wanted).abs().max()) <= 0.05 * 600 + 4 * unit(master) / LR


# --- bounds -----------------------------------------------------------------------------------------------------------


def steps_to_zero(fmt: Format, beta: float) -> float:
    """How long a value at most keeps a code above 0 that decays by ``beta`` beside its block's constant largest.

    Decoded from code c, it comes to the position c - d among the codes, and rounds to floor(c - d + u): never up. It
    leaves c if u < d, at once if d >= 1. Multiples of the golden ratio leave no gap above phi^-(k-1) after F(k+1) of
    them, so u falls below d within F(k+1) <= phi^3 / sqrt(5) / d + 1/2 steps for the least k with phi^-(k-1) <= d. That
    is less than 2 / d + 1. In the first format that has no place for d, 14 bits, beta is 0.9998.
    """
    code, levels = fmt.exp_avg.code, fmt.exp_avg.code.levels
    positions = code.place(beta ** (1 / code.root) * levels)
    at, steps = float(np.searchsorted(levels, code.largest[1])), 0.0
    while at >= 1.0:
        position = float(positions[int(at)])
        distance = at - position
        at, steps = (np.ceil(position), steps + 1.0) if distance >= 1.0 else (at - 1.0, steps + 2.0 / distance + 1.0)
    return steps


@pytest.mark.parametrize("beta", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("fmt", FEW_BITS[1:], ids=str)
def test_what_decays_reaches_zero(fmt: Format, beta: float, device: str) -> None:
    """Lion's weights move as long as there is anything of an average: they stand still in the end."""
    param = nn.Parameter(torch.zeros(16, 128, device=device))
    optimizer = FusedLion([param], lr=LR, betas=(0.9, beta), state_dtype=fmt.dtype)
    most = steps_to_zero(fmt, beta)
    for step in range(100 + int(most)):
        param.grad = normal((16, 128), step).to(device) if step < 100 else torch.zeros_like(param)
        param.grad[:, 7] = 4.0
        optimizer.step()
        if step == 100 + int(most / 20):
            stored = optimizer.get_unscaled_state(param, "exp_avg")
            assert int((stored != 0).sum()) > 16 * 64, "the bound is not far from what happens"
    stored, before = optimizer.get_unscaled_state(param, "exp_avg"), param.detach().clone()
    assert int((stored != 0).sum()) == 16 and bool((stored[:, 7] > 3.9).all())
    optimizer.step()
    assert bool((param == before)[:, torch.arange(128) != 7].all())


@pytest.mark.parametrize("fmt", FEW_BITS[2:], ids=str)
def test_expected_codes_are_those_of_exact_averages(fmt: Format, device: str) -> None:
    """Rounding is unbiased in units of codes: a stored average's mean position is that of the exact one.

    All but a second-order term: one that is e codes off comes back along a curve. With roots of order n it is
    (n - 1) / 2 * beta * mean(e^2) / c at code c, with mean(e^2) < 1 / (1 - beta^2).
    """
    beta, code, sizes = 0.9, fmt.exp_avg.code, 10.0 ** -(3.0 * normal((16, 128), 0).sigmoid())
    sizes[:, 0] = 1.0
    param = nn.Parameter(torch.zeros(16, 128, device=device))
    optimizer = FusedLion([param], lr=LR, betas=(0.9, beta), state_dtype=fmt.dtype)
    places = []
    for step in range(500):
        param.grad = sizes.to(device)
        optimizer.step()
        if step >= 200:
            places.append(optimizer.get_unscaled_state(param, "exp_avg").cpu())
    scale = np.float32(1.0 / code.levels[-1])
    found = code.position(torch.stack(places).numpy(), scale).mean(0)
    exact = code.position(sizes.numpy(), scale)
    curved = (code.root - 1) / 2 * beta / (1 - beta**2) / exact
    assert np.all(np.abs(found - exact) <= 0.1 + curved + (0.0 if code.root > 1 else 0.2))
    assert abs(float((found - exact).mean())) <= 0.05


@pytest.mark.parametrize("u", [0, 2**31, MASK32])
@pytest.mark.parametrize("fmt", FEW_BITS[2:], ids=str)
def test_one_rounding_of_squares_enlarges_no_update_much(fmt: Format, u: int, device: str) -> None:
    """floor(x + u) at code c is of an x below c + 1, and updates go by the root: at most ((c + 1) / c)^4 with int8.

    Nothing positive gets code 0.
    """
    x = 10.0 ** -(16.0 * torch.rand(64, 128, dtype=torch.float64))
    x[:, 0] = 1.0
    states, fractions = STATE_FORMATS[fmt.dtype], torch.full((x.numel(),), u, device=device)
    codes, scale = encode_state(x.float().to(device), Kind.SQUARE, states, 128, fractions)
    kept = decode_state(codes, scale, Kind.SQUARE, states, 128).double().cpu()
    c, code = codes.long().cpu().numpy(), fmt.exp_avg_sq.code
    assert c.min() >= 1
    values = code.levels ** (code.root / 2)
    largest = values[np.minimum(c + 1, len(values) - 1)] / values[c]
    assert np.all((x / kept).sqrt().numpy() <= largest * (1 + 1e-4))


# --- masters ----------------------------------------------------------------------------------------------------------

RATES = (5e-6, 1e-5)
COARSE = FEW_MASTERS[1:]


def way_from_one(master: Master, gradients: Tensor, steps: int, device: str, **options: Any) -> Tensor:
    """How far weights of 1.0 come down with constant gradients, a row for each of RATES."""
    groups = groups_of([torch.ones_like(gradients).to(device, master.param_dtype)], [{"lr": rate} for rate in RATES])
    optimizer = FusedAdamW(groups, **master.options, **options)
    for _ in range(steps):
        give(optimizer, [gradients])
        optimizer.step()
    return 1.0 - positions(optimizer)


@pytest.mark.parametrize("fmt, master", pairwise([FORMAT["float32"], *FEW_BITS], COARSE), ids=str)
def test_tiny_updates_add_up(fmt: Format, master: Master, device: str) -> None:
    """Each is a learning rate, however large the gradient is. A single weight may be off by what its averages err."""
    gradients = 0.1 + normal((2, 128), 0).abs()
    found = way_from_one(master, gradients, 2000, device, state_dtype=fmt.dtype, weight_decay=0.0)
    for way, rate in zip(found, RATES, strict=True):
        assert float(way.mean()) == pytest.approx(2000 * rate, rel=0.02 if master.bits == 16 else 0.03)
        spread = (0.07 if fmt.bytes == 1 else 0.01) * 2000 * rate + min(3 * unit(master), 0.01)
        assert float((way - 2000 * rate).abs().max()) <= spread


@pytest.mark.parametrize("master", COARSE, ids=str)
def test_decay_alone_adds_up(master: Master, device: str) -> None:
    found = way_from_one(master, torch.zeros(2, 128), 1000, device, weight_decay=1.0)
    for way, rate in zip(found, RATES, strict=True):
        exact = 1.0 - (1.0 - rate) ** 1000
        assert float(way.mean()) == pytest.approx(exact, rel=0.02)
        assert float((way - exact).abs().max()) <= min(2 * unit(master), 0.01)


# --- rare and wide inputs ---------------------------------------------------------------------------------------------

SOME_BETAS = [(0.8, 0.95), (0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.95, 0.999)]


class Compared(NamedTuple):
    """Ours and torch's optimizers after the same gradients, a row of each tensor for each of SOME_BETAS.

    ``error``: how far our weights are from torch's, in relation to their way. ``largest``, ``exact_largest``: of
    updates, in learning rates.
    """

    exact: torch.optim.Optimizer
    error: Tensor
    largest: Tensor
    exact_largest: Tensor


def compared(fmt: Format, gradients: Sequence[Tensor], device: str) -> Compared:
    options, values = [{"betas": betas} for betas in SOME_BETAS], torch.zeros_like(gradients[0])
    ours = FusedAdamW(groups_of([values.to(device)], options), lr=LR, weight_decay=0.0, state_dtype=fmt.dtype)
    exact = torch.optim.AdamW(groups_of([values], options), lr=LR, weight_decay=0.0, foreach=True)
    ways = []
    for optimizer in (ours, exact):
        way = []
        for gradient in gradients:
            give(optimizer, [gradient])
            optimizer.step()
            way.append(torch.stack([group["params"][0].detach().cpu() for group in optimizer.param_groups]))
        ways.append(torch.stack(way).flatten(2))
    largest, exact_largest = (way.diff(dim=0).abs().amax((0, 2)) / LR for way in ways)
    error = (ways[0] - ways[1])[-1].norm(dim=1) / ways[1][-1].norm(dim=1)
    return Compared(exact, error, largest, exact_largest)


@pytest.mark.parametrize("fmt, period", pairwise(FEW_BITS, [89, 100]), ids=str)
def test_rare_rows(fmt: Format, period: int, device: str) -> None:
    """A row of an embedding has gradients in every 100th step, or every 89th, a Fibonacci number."""
    shape = (8, 128)
    sizes, phases = normal(shape, 10**6).exp(), torch.arange(shape[0])[:, None] * 37
    rare = [torch.where((step + phases) % period == 0, (normal(shape, step) + 0.3) * sizes, 0.0) for step in range(600)]
    found = compared(fmt, rare, device)
    assert float(found.error.max()) < {"bfloat16": 0.01, "float16": 0.002, "int8": 0.03}.get(str(fmt), 0.08)
    assert bool((found.largest <= 1.25 * found.exact_largest).all())


FACTORS = [10.0, 10000.0]


@functools.cache
def wide(fmt: Format, factor: float, device: str) -> Compared:
    """One column of each block is ``factor`` times larger than the others."""
    gradients = [normal((8, 128), step) for step in range(400)]
    for gradient in gradients:
        gradient[:, 5] *= factor
    return compared(fmt, gradients, device)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("fmt", FEW_BITS, ids=str)
def test_one_column_is_much_larger(fmt: Format, factor: float, device: str) -> None:
    """The error of the way is below the relative distance of neighbouring codes, of both moments together.

    That of int8 is 4 / c at code c for both: the fourth root of exp_avg has 127 levels, that of the root of exp_avg_sq
    255, and the next one is ((c + 1) / c)^4 times as large. A usual value has the code top * (value / largest)^(1/4).
    Of E4M3 it is 1/8 at most, of BF16 2^-7, and of FP16, here with values above 2^-29 of the largest, 2^-10.
    """
    found = wide(fmt, factor, device)
    for error, group in zip(found.error, found.exact.param_groups, strict=True):
        state, distance = found.exact.state[group["params"][0]], 0.0
        for top, values in ((127, state["exp_avg"].abs()), (255, state["exp_avg_sq"].sqrt())):
            usual = values[:, :5].square().mean().sqrt() / values.amax(1).mean()
            int8 = 4.0 / (top * float(usual) ** 0.25)
            distance += {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float8_e4m3fn": 2.0**-3}.get(str(fmt), int8)
        assert float(error) <= distance
    assert bool((found.largest <= 2.2 * found.exact_largest).all())
    if str(fmt) == "int8":
        assert bool((found.largest <= 1.5 * wide(FORMAT["float8_e4m3fn"], factor, device).largest).all())
