"""One description per option: signatures, types, docstrings, settings, attributes and warnings follow from it."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch
from torch import nn

from fused_optim import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLion, FusedMuon
from fused_optim.compat import apex, transformer_engine
from fused_optim.options import reading, table

NATIVE = {
    FusedAdam: reading.Options,
    FusedAdamW: reading.Options,
    FusedLion: reading.LionOptions,
    FusedMuon: reading.MuonOptions,
    FusedAdEMAMix: reading.AdEMAMixOptions,
}
DROP_INS = {
    apex.FusedAdam: reading.OptionsBesideApex,
    transformer_engine.FusedAdam: reading.OptionsBesideTransformerEngine,
}


def parameters(kind: Any) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(kind).parameters.items() if name != "params"}


def test_type_checkers_know_every_option() -> None:
    """The one second spelling: each name of it is in the table, with the same type, and each of the table in it."""
    for options in NATIVE.values():
        for name, kind in typing.get_type_hints(options).items():
            assert typing.get_args(table.OPTIONS[name].__orig_class__) == (kind,), name  # type: ignore[attr-defined]
    spelled = {name for kind in NATIVE for name in parameters(kind)}
    assert spelled >= table.OPTIONS.keys() - table.OF_DROP_INS.keys()
    for kind, options in DROP_INS.items():
        known = parameters(kind).keys() - {"adam_w_mode", "options"} | typing.get_type_hints(options).keys()
        assert known == table.OF_SETTINGS.keys() | parameters(FusedAdam).keys()


@pytest.mark.parametrize("kind", NATIVE)
def test_signatures_and_docstrings_have_every_option(kind: Any) -> None:
    """Whatever shows arguments, such as jsonargparse, finds names, types and the table's defaults."""
    found = parameters(kind)
    assert NATIVE[kind].__annotations__.keys() <= found.keys()
    assert kind is not FusedAdamW or [*found] == [*parameters(FusedAdam)]
    for name, each in found.items():
        if each.kind is inspect.Parameter.KEYWORD_ONLY or kind is FusedAdam:
            assert each.default == table.OPTIONS[name].default, name
        if kind is not FusedAdamW:
            assert kind.__doc__.count(f"\n    {name}: ") == 1, name


def test_an_attribute_is_read_as_an_argument() -> None:
    optimizer = FusedAdamW([nn.Parameter(torch.ones(3))])
    optimizer.seed = "7"  # type: ignore[assignment]
    assert optimizer.seed == optimizer.settings.seed == 7
    with pytest.raises(ValueError, match=r"^offload_fraction: expected a number in \[0, 1\], got 2.0"):
        optimizer.offload_fraction = 2.0
    with pytest.raises(ValueError, match=r"^checkpoint_format='torch' is torch"):
        FusedLion([nn.Parameter(torch.ones(3))]).checkpoint_format = "torch"
    assert optimizer.offload_fraction == 1.0
