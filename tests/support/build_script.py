"""setup.py as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load_build_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """setup.py, in its folder, without what it does when it is run. Skips the test where it cannot be imported."""
    setuptools = pytest.importorskip("setuptools")
    pytest.importorskip("ninja")
    pytest.importorskip("pybind11")
    if not (ROOT / "setup.py").exists():
        pytest.skip("an installed package has no setup.py")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_script", module)
    spec.loader.exec_module(module)
    return module
