"""The examples with other packages, by the commands of the pages that show them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import fresh
from walkthrough import follow

pytestmark = pytest.mark.timeout(900)  # many processes, each of which imports torch


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def test_hugging_face_trainer(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    follow("how_to/trainer.md", tmp_path)


def losses_on(ranks: int, folder: Path) -> str:
    """What the example of FSDP2 prints, on CPUs."""
    script = Path(__file__).parents[2] / "examples" / "fsdp2.py"
    return fresh.torchrun(ranks, script, "--steps", "10", "--checkpoints", folder / str(ranks), folder=folder)


@pytest.mark.long  # tests/test_walkthroughs.py follows the page on ranks that divide it
def test_fsdp2_on_ranks_that_do_not_divide_the_batch(tmp_path: Path) -> None:
    """Twelve sequences on five ranks: the losses of one rank."""
    alone = losses_on(1, tmp_path)
    assert alone.startswith("step 1: loss 5.") and alone.count("step") == 2
    assert losses_on(5, tmp_path) == alone


def test_torchtitan(tmp_path: Path) -> None:
    need("torchtitan", "tokenizers", "triton")
    follow("how_to/torchtitan.md", tmp_path, {"torchtitan.train": "titan_on_cpu"})
    assert list(tmp_path.glob("titan/outputs/checkpoint/step-10/*.distcp"))
