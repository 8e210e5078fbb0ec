"""``benchmarks/peer_suites.py``, with small packages and tests in the place of the peers' own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import peer_suites
from peer_plugin import OPTIMIZERS
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
# As in torch: tests made of a table of optimizers, and some in processes that they start.
TORCH_FILE = """
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import optim_db, optims
from torch.testing._internal.common_utils import TestCase

class TestOptimRenewed(TestCase):
    @optims(optim_db)
    def test_class(self, device, dtype, optim_info):
        assert optim_info.optim_cls is getattr(torch.optim, optim_info.optim_cls.__name__)
        optimizer = optim_info.optim_cls([torch.zeros(2)])
        assert optimizer.param_groups[0]["weight_decay"] == 0.01 * (optim_info.name == "AdamW")
        assert optimizer.state_dict()["param_groups"][0]["decoupled_weight_decay"] == (optim_info.name == "AdamW")

    @optims(optim_db)
    def test_amsgrad(self, device, dtype, optim_info):
        param = torch.ones(2, requires_grad=True)
        optim_info.optim_cls([{"params": [param], "amsgrad": True}], amsgrad=True, differentiable=True)

instantiate_device_type_tests(TestOptimRenewed, globals())
"""
DTENSORS_FILE = """
import multiprocessing
import torch

def found(queue):
    queue.put(torch.optim.Adam.__mro__[1].__name__)

def test_adam_1d():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=found, args=(queue,))
    process.start()
    name = queue.get(timeout=60)
    process.join()
    assert name == torch.optim.Adam.__mro__[1].__name__ == "FusedAdam", name
"""
# Rank 0 fails and ends; rank 1 goes on after that.
RANKS_DIFFER = """
import time
from pathlib import Path

OTHER = Path(__file__).with_name("pid")

def test_first():
    if os.environ["RANK"] == "0":
        OTHER.write_text(str(os.getpid()))
        raise ValueError

def test_second():
    if os.environ["RANK"] == "1":
        while not OTHER.exists() or Path("/proc", OTHER.read_text(), "exe").exists():
            time.sleep(0.05)
        time.sleep(2)
        raise ValueError("first line\\nlast line")
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


def test_suites_of_a_peer_follow_one_another() -> None:
    found = [[suite for suite, _ in lane] for lane in peer_suites.lanes(list(SUITES))]
    assert found == [[TE] * 3, [SHARDED, RESHARDED] * 3, [APEX] * 3, [TORCH, DTENSORS, STATE_DICTS] * 3]


@pytest.mark.long
def test_several_ranks(sources: Path) -> None:
    """A test that fails on any rank has failed, and no rank ends the others."""
    found = peer_suites.outcomes(RESHARDED, "theirs", sources, sources / "log")
    assert counts(found) == {"passed": 3, "failed": 1} and not found["unexpected"] and not found["unfinished"]
    (sources / FSDP2).write_text(FSDP2_FILE + RANKS_DIFFER)
    found = peer_suites.outcomes(SHARDED, "drop_in", sources, sources / "log")
    assert counts(found) == {"passed": 2, "failed": 2} and not found["unfinished"]
    first, second = found["unexpected"]
    assert first.endswith("::test_first") and second == "run_fsdp2_fused_adam.py::test_second"
    assert found["failures"][second] == "ValueError: first line\nlast line"


@pytest.mark.long
@pytest.mark.parametrize("optimizer, unexpected", [("own", 0), ("drop_in", 2)])
def test_some_failures_are_expected_of_one_class(sources: Path, optimizer: str, unexpected: int) -> None:
    (sources / FSDP2).write_text(FSDP2_FILE + "def test_fused_adam_fp8_master_weights(recipe): assert False\n")
    found = peer_suites.outcomes(SHARDED, optimizer, sources, sources / "log")
    assert found["failed"] == 2 and len(found["unexpected"]) == unexpected


@pytest.mark.long
def test_torchs_classes_are_replaced(sources: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it")
    for suite, text in ((TORCH, TORCH_FILE), (DTENSORS, DTENSORS_FILE)):
        (sources / suite.files[0]).parent.mkdir(parents=True, exist_ok=True)
        (sources / suite.files[0]).write_text(text)
    found = {each: peer_suites.outcomes(TORCH, each, sources, sources / "log") for each in OPTIMIZERS["torch"]}
    assert {each: counts(own) for each, own in found.items()} == {
        "own": {"passed": 2, "failed": 2},
        "supported": {"passed": 4},
        "theirs": {"passed": 4},
    }
    assert found["own"]["class"] == "fused_optim.adam.FusedAdam, fused_optim.adam.FusedAdamW"
    assert found["own"]["reasons"] == {"differentiable is refused": 2} and not found["own"]["unexpected"]
    for each, outcome in {"supported": "passed", "theirs": "failed"}.items():
        assert counts(peer_suites.outcomes(DTENSORS, each, sources, sources / "log")) == {outcome: 1}


def test_reasons_are_of_tests_and_messages() -> None:
    message = "parameter 0: expected ..., got torch.float64; convert it to torch.float32"
    assert peer_suites.reason_of("file.py::A::test_x", message, "supported") == "float64 parameters are refused"
    assert peer_suites.reason_of("file.py::A::test_x", message, "theirs") is None
    assert peer_suites.reason_of("file.py::test_fp16_master", "", "theirs") is not None
    assert peer_suites.reason_of("file.py::test_fp16_master_2", "", "theirs") is None


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


def test_blobs_are_those_of_git(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("what is up, doc?")  # the example of git's book
    assert peer_suites.blob(tmp_path / "file") == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"
