"""One description per option: signatures, types, docstrings, settings, attributes and warnings follow from it."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fused_optim
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


OLD_AND_NEW = {
    "table.py": [
        ("        capturable: ", "        dummy: an option that was added.\n        capturable: "),
        ("    capturable = ", '    dummy = Option[float](0.5, _fraction, "is refused")\n    capturable = '),
    ],
    "reading.py": [("    state_dtype: ", "    dummy: float\n    state_dtype: ")],
}
USED = r"""
import torch
from fused_optim import FusedAdamW, FusedMuon, enable_gradient_release
from fused_optim.compat.apex import FusedAdam

model = torch.nn.Linear(3, 3)
for kind in (FusedAdamW, FusedMuon, FusedAdam):
    optimizer = kind([model.weight], dummy="0.25")
    assert optimizer.dummy == optimizer.settings.dummy == optimizer.defaults["dummy"] == 0.25
    optimizer.dummy = "0.75"
    assert optimizer.dummy == 0.75 and "dummy" not in optimizer.param_groups[0]
assert "\n    dummy: an option that was added.\n" in FusedMuon.__doc__
optimizer = FusedAdamW([{"params": model.parameters(), "dummy": 0.75}])
assert optimizer.dummy == 0.5 and optimizer.stepper.ignored == {0: ["dummy"]}
for refused in (
    lambda: FusedAdamW(model.parameters(), dummy=2),
    lambda: FusedAdamW(model.parameters(), dumy=1),
    lambda: enable_gradient_release(model, optimizer),
):
    try:
        refused()
    except (RuntimeError, TypeError, ValueError) as error:
        print(error)
"""


def test_an_option_is_added_in_the_table_and_its_second_spelling(tmp_path: Path) -> None:
    """Three lines in two files of a copy of the package: constructors, attributes, help and errors have the option."""
    (tmp_path / "fused_optim" / "options").mkdir(parents=True)
    package = Path(fused_optim.__file__).parent
    for file in [*package.iterdir(), *(package / "options").glob("*.py")]:
        if file.name not in ("options", "__pycache__"):
            (tmp_path / "fused_optim" / file.relative_to(package)).symlink_to(file)
    for name, changes in OLD_AND_NEW.items():
        text = (package / "options" / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / "fused_optim" / "options" / name).unlink()
        (tmp_path / "fused_optim" / "options" / name).write_text(text)
    run = subprocess.run(
        [sys.executable, "-c", USED], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "dummy: expected a number in [0, 1], got 2",
        "FusedAdamW() got an unexpected argument 'dumy'; did you mean dummy?",
        "dummy=True is refused: do without one of the two",
    ]
