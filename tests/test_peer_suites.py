"""``benchmarks/peer_suites.py``, with small packages and tests in the place of the peers' own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import peer_suites
from peer_suites import APEX_TESTS, FSDP2, SUITES, TE_TESTS

ROOT = Path(__file__).parents[1]
TE, SHARDED, RESHARDED, APEX, TORCH, DTENSORS, STATE_DICTS = SUITES
PACKAGE = "class FusedAdam: ..."
pytestmark = pytest.mark.usefixtures("forked_python")

TE_FILE = """
import pytest
from transformer_engine.pytorch import optimizers

def test_name(): assert optimizers.FusedAdam.__name__ == "FusedAdam"

def test_fp16_master(): assert optimizers.FusedAdam.__module__.startswith("transformer_engine."), "of another package"

@pytest.mark.skip(reason="another GPU")
def test_mxfp8(): ...

@pytest.mark.xfail(strict=True)
def test_not_yet(): assert False

def test_SGD(): assert False
"""
# As in Apex: classes of unittest, in two files.
APEX_FILE = """
import unittest
import apex

class AdamTest(unittest.TestCase):
    def testName(self): self.assertEqual(apex.optimizers.FusedAdam.__name__, "FusedAdam")
    def testLargeTensor(self): raise MemoryError
"""
CONFTEST = """
import os
import pytest

@pytest.fixture(params=["DelayedScaling", "Float8BlockScaling"])
def recipe(request): return request.param

@pytest.fixture
def ranks(): return int(os.environ["WORLD_SIZE"])
"""
FSDP2_FILE = """
import os

def test_ranks(recipe, ranks): assert ranks == 2
def test_hybrid(): assert False
def test_dcp_resharding_save(recipe, ranks): assert ranks == 2
def test_dcp_resharding_load(recipe, ranks): assert ranks == 1 and recipe == "DelayedScaling"
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "site/transformer_engine/pytorch/optimizers.py": PACKAGE,
        "apex/apex/__init__.py": "from . import optimizers",
        "apex/apex/optimizers.py": PACKAGE,
        TE.files[0]: TE_FILE,
        f"{TE_TESTS}/distributed/conftest.py": "raise RuntimeError('of other tests')",
        FSDP2: FSDP2_FILE,
        str(Path(FSDP2).with_name("conftest.py")): CONFTEST,
        f"{APEX_TESTS}/__init__.py": "",
        **dict.fromkeys(APEX.files, APEX_FILE),
        "pytest.ini": "[pytest]\naddopts = --no-such-option",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    return tmp_path


def counts(found: dict[str, object]) -> dict[str, object]:
    return {outcome: found[outcome] for outcome in peer_suites.OUTCOMES if found[outcome]}


@pytest.mark.long
def test_one_gpu(sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(peer_suites, "machine", lambda device, commit: {"device": str(device), "commit": commit})
    output = sources / "results.json"
    assert peer_suites.main([str(sources), "--output", str(output), "--commit", "abc"]) == 0
    report = json.loads(output.read_text())
    assert report["machine"] == {"device": "cuda", "commit": "abc", "gpus": 1}
    assert report["not_run"] == [each.name for each in (SHARDED, RESHARDED, TORCH, DTENSORS, STATE_DICTS)]
    assert set(report["suites"]) == {TE.name, APEX.name}
    te, apex = report["suites"][TE.name], report["suites"][APEX.name]
    assert {name: found["class"] for name, found in te.items()} == {
        "own": "fused_optim.adam.FusedAdam",
        "drop_in": "fused_optim.compat.transformer_engine.FusedAdam",
        "theirs": "transformer_engine.pytorch.optimizers.FusedAdam",
    }
    assert apex["drop_in"]["class"] == "fused_optim.compat.apex.FusedAdam"
    assert all(counts(found) == {"passed": 2} for found in apex.values())
    assert counts(te["theirs"]) == {"passed": 2, "skipped": 1, "xfailed": 1}
    for ours in (te["own"], te["drop_in"]):
        assert counts(ours) == {"passed": 1, "skipped": 1, "xfailed": 1, "failed": 1}
        (message,) = ours["failures"].values()
        assert "of another package" in message and not ours["unexpected"]
    assert f"{TE.name}, own: 1 passed, 1 skipped, 1 xfailed, 1 failed (" in capsys.readouterr().out
    log = (sources / "results.log").read_text()
    assert log.count("test_SGD") == 0 and log.count("test_fp16_master FAILED") == 2


@pytest.mark.parametrize("broken", ["\ndef test_ends():\n    import os; os._exit(0)\n", "\nimport no_such_module\n"])
def test_suites_that_do_not_end(sources: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    (sources / TE.files[0]).write_text(TE_FILE + broken)
    found = peer_suites.outcomes(TE, "theirs", sources, sources / "log")
    assert found["unfinished"] == ["not SGD"] and not found["unexpected"]
    monkeypatch.setattr(peer_suites, "outcomes", lambda *arguments: found)
    assert peer_suites.main([str(sources), "--output", str(sources / "results.json")]) == 1


def test_unexpected_failures_are_the_exit_status(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / TE.files[0]).write_text(TE_FILE + "\ndef test_wrong(): assert False\n")
    found = peer_suites.outcomes(TE, "theirs", sources, sources / "log")
    assert found["unexpected"] == ["test_fused_optimizer.py::test_wrong"] and not found["unfinished"]
    monkeypatch.setattr(peer_suites, "outcomes", lambda *arguments: found)
    assert peer_suites.main([str(sources), "--output", str(sources / "results.json")]) == 1


def test_what_is_missing_is_named(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sources / TE.files[0]).unlink()
    for folder, file in ((sources, TE.files[0]), (sources / "site", TE.files[0])):  # the second has none of them
        with pytest.raises(SystemExit):
            peer_suites.main([str(folder), "--output", str(sources / "results.json")])
        assert f"{folder / file} is missing" in capsys.readouterr().err
