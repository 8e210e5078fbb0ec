"""Bits of changes: who sets them without copies, how they become indices, and who notices what others write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from change_cases import INTEGERS, RECIPES, bits, set_gradients
from fused_optim.adapters import Fractions, adapter_of
from fused_optim.backends import changed_bits, looks
from fused_optim.backends.changed_bits import MarkedTensor, bit_bytes, collect, set_all
from fused_optim.backends.engine import CachedShard
from fused_optim.memory.by_parameter import Held
from fused_optim.quantized import Float8BlockScaling, Float8DelayedScaling, NVFP4BlockScaling, quantize_model_
from fused_optim.quantized.recipes import Encoding, codec
from fused_optim.sharding.dtensor import Geometry
from fused_optim.state import changes
from peers import FusedAdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@pytest.fixture(params=["engine", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("FUSED_OPTIM_BACKEND", "torch")
    return str(request.param)


# --- collecting ---------------------------------------------------------------------------------------------------

NUMELS = [0, 1, 7, 32, 33, 4095, 32767, 32768, 32769, 131_073]


def _packed(flags: Tensor) -> Tensor:
    """A bit each, as in the module's description."""
    packed = np.zeros(bit_bytes(flags.numel()), dtype=np.uint8)
    found = np.packbits(flags.numpy(), axis=None, bitorder="little")
    packed[: found.size] = found
    return torch.from_numpy(packed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 0.7, 1.0])
def test_marked_elements_are_collected(device: str, by: str, share: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors, expected = [], []
    for i, numel in enumerate(NUMELS):
        flags = torch.rand(numel, generator=generator) < share
        values = (100 * torch.rand(numel, generator=generator)).to(dtype)
        packed = torch.zeros(bit_bytes(numel), dtype=torch.uint8)
        if share == 1.0:
            set_all(packed, numel)
        else:
            packed = _packed(flags)
        first = 1000 * (i % 2)
        tensors.append(MarkedTensor(packed.to(device), values.to(device), first))
        expected.append((flags.nonzero().view(-1) + first, values[flags]))
    for (indices, values), (where, what) in zip(collect(tensors), expected, strict=True):
        assert indices.dtype == torch.int64 and torch.equal(indices.cpu(), where)
        assert torch.equal(values.cpu(), what)
    assert collect([]) == []


def test_tensors_of_several_dtypes_at_once(device: str, by: str) -> None:
    """Of which some are marked as a whole, some in part."""
    dtypes = [torch.float32, torch.uint8, torch.bfloat16, torch.float32, torch.uint8]
    shares = [1.0, 0.1, 1.0, 0.5, 1.0]
    generator = torch.Generator().manual_seed(2)
    flags = [torch.rand(1000 + i, generator=generator) < share for i, share in enumerate(shares)]
    values = [torch.arange(each.numel()).to(dtype) for each, dtype in zip(flags, dtypes, strict=True)]
    pairs = zip(flags, values, strict=True)
    taken = collect([MarkedTensor(_packed(each).to(device), value.to(device)) for each, value in pairs])
    for (indices, found), each, value in zip(taken, flags, values, strict=True):
        assert torch.equal(indices.cpu(), each.nonzero().view(-1)) and torch.equal(found.cpu(), value[each])


def test_a_thousand_tensors_whose_bits_lie_together(device: str, by: str) -> None:
    """More than a launch has room for; a stretch that is full, and the rest almost empty."""
    numels = [70_001, *range(1000)]
    flags = [torch.zeros(numel, dtype=torch.bool) for numel in numels]
    for own in flags:
        own[3:7] = True
    flags[0][20_000:40_000] = True
    tensors = [
        MarkedTensor(_packed(own).to(device), torch.arange(own.numel()).to(device, torch.int32)) for own in flags
    ]
    for (indices, values), own in zip(collect(tensors), flags, strict=True):
        assert torch.equal(indices.cpu(), own.nonzero().view(-1))
        assert torch.equal(values.cpu().long(), indices.cpu())


# --- encoders -----------------------------------------------------------------------------------------------------

SHAPES = [(256, 384), (130, 160), (200, 36), (1, 16)]


def _encoding(recipe: Any, shape: tuple[int, int], device: str, seed: int) -> Encoding:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    components = recipe.empty(shape, torch.device(device))
    for part in components.values():
        part.view(-1).view(torch.uint8).zero_()
    if "tensor_scale" in components:
        components["tensor_scale"].fill_(0.01)
    numels = {name: part.numel() for name, part in components.items() if name in ("data", "scale")}
    marks = {name: torch.zeros(bit_bytes(numel), dtype=torch.uint8) for name, numel in numels.items()}
    marks = {name: mark.to(device) for name, mark in marks.items()}
    return Encoding(recipe, components, values, None, marks)


@pytest.mark.parametrize("rotating", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_encoders_mark_what_they_change(
    device: str, by: str, recipe: Any, shape: tuple[int, int], rotating: bool
) -> None:
    if isinstance(recipe, NVFP4BlockScaling) and shape[1] % 16:
        pytest.skip("blocks of 16")
    one = _encoding(recipe, shape, device, 0)
    for seed, share in ((1, 1.0), (2, 0.01), (3, 0.0)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
        kept = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(device) >= share
        fractions = (
            Fractions(7, Geometry(values.numel(), 3, values.numel(), values.numel(), 0), seed) if rotating else None
        )
        one = one._replace(values=torch.where(kept, one.values, values), fractions=fractions)
        before = {name: bits(one.components[name]) for name in one.changes}
        for mark in one.changes.values():
            mark.zero_()
        codec.encode([one])
        for name, mark in one.changes.items():
            differs = before[name] != bits(one.components[name])
            assert torch.equal(mark.cpu(), _packed(differs)), (name, seed)
            assert differs.any() or seed > 1 or name == "scale", "nothing changes in this test"


def test_scales_of_whole_weights_are_marked(device: str, by: str) -> None:
    recipe = Float8DelayedScaling(amax_history_len=2)
    weights = [_encoding(recipe, (16, 16), device, seed) for seed in range(3)]
    marks = [torch.zeros(32, dtype=torch.uint8, device=device) for _ in weights]
    absmaxes = [torch.full((1,), float(seed), device=device) for seed in range(3)]
    scales = codec.Scales([each[:2] for each in weights], None, [marks[0], None, marks[2]])
    for _ in range(2):
        before = [bits(each.components["tensor_scale"]) for each in weights]
        for mark in marks:
            mark.zero_()
        scales.prepare(None)
        scales.rescale(absmaxes, None, advance=True)
        after = [bits(each.components["tensor_scale"]) for each in weights]
        changed = [int(not torch.equal(*each)) for each in zip(before, after, strict=True)]
        assert [int(mark[0]) for mark in marks] == [changed[0], 0, changed[2]]
        assert not any(mark[1:].any() for mark in marks)


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
def test_usual_steps_copy_nothing(
    device: str, recipe: Any, skips: bool, separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is marked where it is written."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128, bias=False)).to(device, torch.bfloat16)
    if recipe is not None:
        quantize_model_(model, recipe)
    options: dict[str, Any] = {"skip_nonfinite": skips, "store_param_remainders": False if separate else None}
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, state_dtype="int8", **options)
    optimizer.track_changes()
    copied: list[int] = []
    compare = changes.compare

    def counting(parts: Any) -> None:
        given = list(parts)
        copied.append(len(given))
        compare(given)

    monkeypatch.setattr(changes, "compare", counting)
    monkeypatch.setattr(codec, "compare", counting)
    for seed in range(4):
        set_gradients(model, seed)
        optimizer.step()
        if seed == 0 and (separate or recipe is not None):  # nobody knows whether weights are their rounded masters
            copied.clear()
    assert sum(copied) == 0


def test_blocks_that_ranks_cut_are_not_left_to_the_encoder() -> None:
    model = nn.Linear(128, 256, bias=False)
    quantize_model_(model, Float8BlockScaling(), lambda module, _: True)
    adapter = adapter_of(model.weight)
    assert adapter is not None and set(adapter.marks(model.weight)) == {"data", "scale"}
    lower = model.weight.detach()[64:]
    assert lower.rows_before == 64 and not adapter.marks(lower)


# --- looks --------------------------------------------------------------------------------------------------------


def _clamp(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.clamp_(-0.1, 0.1)


def _new_memory(param: nn.Parameter) -> None:
    param.data = torch.zeros_like(param)


@pytest.mark.parametrize("write", [_clamp, _new_memory])
@pytest.mark.parametrize("has_engine", [True, False])
def test_what_others_write_is_seen(
    device: str, has_engine: bool, write: Callable[[nn.Parameter], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_engine:
        monkeypatch.setattr(looks, "any_engine", lambda: None)
    params = [nn.Parameter(torch.randn(4, 4, device=device)) for _ in range(3)]
    masters = [torch.zeros(4, 4, device=device), None, torch.zeros(4, 4, device=device)]
    cached = [CachedShard(Held((p,)), None, None, m, None, {}) for p, m in zip(params, masters, strict=True)]
    own = [looks.new_look(param, ()) for param in params]
    looker = looks.looker_on(torch.device(params[0].device))
    assert looker.find_written(cached, own) == ([0, 1, 2], [0, 2])
    assert looker.remember(cached, own) == [0, 1, 2]
    assert looker.find_written(cached, own) == ([], []) and looker.remember(cached, own) == []
    write(params[1])
    masters[2].zero_()
    assert looker.find_written(cached, own) == ([1], [2])
    assert looker.remember(cached, own) == ([1] if write is _new_memory else [])
    own[0].forget()
    assert looker.find_written(cached, own) == ([0], [])


@pytest.mark.parametrize("has_engine", [True, False])
def test_quantized_parts_are_looked_at(has_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_engine:
        monkeypatch.setattr(looks, "any_engine", lambda: None)
    model = nn.Linear(128, 128, bias=False)
    quantize_model_(model, Float8BlockScaling(), lambda module, _: True)
    cached = [CachedShard(Held((model.weight,)), None, None, None, None, {})]
    own = [looks.new_look(model.weight, ["data", "scale"])]
    looker = looks.looker_on(torch.device("cpu"))
    looker.remember(cached, own)
    assert looker.find_written(cached, own) == ([], [])
    model.weight.components["scale"].mul_(2)
    assert looker.find_written(cached, own) == ([0], [])
    looker.remember(cached, own)
    model.weight.components["data"] = model.weight.components["data"].clone()
    assert looker.find_written(cached, own) == ([0], [])


def test_bits_of_copies() -> None:
    """The reference of all comparisons here: NaN and zeros by their bits."""
    before = torch.tensor([0.0, float("nan"), 1.0])
    after = torch.tensor([-0.0, float("nan"), 1.0])
    marks = torch.zeros(32, dtype=torch.uint8)
    changed_bits.compare([(marks, changed_bits.raw_bits(before), changed_bits.raw_bits(after))])
    assert marks[0] == 1 and before.view(INTEGERS[4])[0] != after.view(INTEGERS[4])[0]
