"""The examples with other packages, by the commands of the pages that show them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from walkthrough import follow

pytestmark = pytest.mark.timeout(900)  # many processes, each of which imports torch


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def test_hugging_face_trainer(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    follow("how_to/trainer.md", tmp_path)


def test_torchtitan(tmp_path: Path) -> None:
    need("torchtitan", "tokenizers", "triton")
    follow("how_to/torchtitan.md", tmp_path, {"torchtitan.train": "titan_on_cpu"})
    assert list(tmp_path.glob("titan/outputs/checkpoint/step-10/*.distcp"))
