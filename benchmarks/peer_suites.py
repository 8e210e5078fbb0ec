"""The tests that peers have of their Adam, run with this package's optimizers in its place, and with theirs.

``python benchmarks/peer_suites.py SOURCES --output peer_suites.json`` writes the outcomes, and pytest's output to
``peer_suites.log`` beside them. docs/contributing/testing.md says what lies in SOURCES. The exit status is 1 if a test
fails that ``EXPECTED`` and ``EXPECTED_OF_OWN`` do not name, or if a suite does not come to its end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peer_plugin import OPTIMIZERS, UNSUPPORTED
from step import machine, write

# Parts of "TEST: MESSAGE" of a failure, as regular expressions, and why it is none.
EXPECTED = {
    r"^test_fp16_master:": "by design: docs/numerics.md, on FP16 masters",
    r"^test_fp8_exp_avg:": "by design: FP8 first moments rotate, and err by up to a whole code instead of half of one",
    r"^test_dcp_resharding_load\[Float8BlockScaling\]:": "TransformerEngine's test_torch_fsdp2.py expects it",
}
# Of torch's tests; docs/drop_in.md says more of them.
_TORCHS = {
    r"got torch\.float64; convert it": "float64 parameters are refused",
    r"got torch\.complex64; pass torch\.view_as_real": "complex parameters are refused",
    r"^test_errors_.* does not match": "the same error in other words",
    r"^test_adamw_serialization_": "an argument of the optimizer says how weights decay, no state dict",
    r"^test_can_load_from_to_named_state_dict_is_named_optim0_True_is_named_optim1_False_.*'param_names": (
        "an optimizer keeps the names that it was made with, and takes none from a state dict"
    ),
    r"KeyError: .param_groups\.[^']*\.bias_correction": (
        "torch asks for the keys of running groups, which its own form of a state dict does not have"
    ),
    r"^test_multi_param_groups.*item \[\d+\]\['step'\]": "the step of a group without parameters is in no state",
    r"^test_fused_error_on_params_on_meta_.*RuntimeError not raised": "parameters on the meta device can be stepped",
}
# Of one class alone. By default a BF16 parameter's master is the 16 bits that it lacks, where the test expects FP32.
EXPECTED_OF = {
    "own": {
        r"^test_fused_adam_fp8_master_weights\[(DelayedScaling|Float8CurrentScaling|Float8BlockScaling)\]:": (
            "by design: docs/numerics.md, on master weights"
        ),
        **{f"{name}=True is not supported": f"{name} is refused" for name in UNSUPPORTED},
        **_TORCHS,
    },
    "supported": _TORCHS,
}
OUTCOMES = ("passed", "xpassed", "skipped", "xfailed", "failed", "error")  # where ranks differ, the last one counts
FAILURES = ("failed", "error")
SECONDS_PER_TEST = 120


@dataclass(frozen=True)
class Part:
    """``tests``: pytest's -k. Without ``ranks`` torchrun starts none."""

    tests: str
    ranks: int = 0


@dataclass(frozen=True)
class Suite:
    name: str
    peer: str
    files: tuple[str, ...]
    parts: tuple[Part, ...]
    needs: int = 0  # GPUs, where the tests themselves start a process for each

    @property
    def folder(self) -> str:
        return self.files[0].split("/")[0]

    @property
    def ranks(self) -> int:
        return max(part.ranks for part in self.parts)

    def can_run(self, sources: Path, gpus: int) -> bool:
        return (sources / self.folder).is_dir() and max(self.ranks, self.needs) <= gpus


TE_TESTS = "TransformerEngine/tests/pytorch"
FSDP2 = f"{TE_TESTS}/distributed/fsdp2_tests/run_fsdp2_fused_adam.py"
APEX_TESTS = "apex/tests/L0/run_optimizers"
TORCH_TESTS = "pytorch/test"
SUITES = (
    Suite("TransformerEngine", "transformer_engine", (f"{TE_TESTS}/test_fused_optimizer.py",), (Part("not SGD"),)),
    Suite("TransformerEngine FSDP2", "transformer_engine", (FSDP2,), (Part("not hybrid and not dcp_resharding", 2),)),
    Suite(
        "TransformerEngine FSDP2, 2 ranks to 1",
        "transformer_engine",
        (FSDP2,),
        (Part("dcp_resharding_save and not hybrid", 2), Part("dcp_resharding_load and not hybrid", 1)),
    ),
    Suite(
        "Apex",
        "apex",
        (f"{APEX_TESTS}/test_adam.py", f"{APEX_TESTS}/test_fused_optimizer.py"),
        (Part("Adam and not Large"),),
    ),
    Suite("torch.optim", "torch", (f"{TORCH_TESTS}/test_optim.py",), (Part("TestOptimRenewed and (_Adam_ or AdamW)"),)),
    Suite(
        "torch.optim of DTensors",
        "torch",
        (f"{TORCH_TESTS}/distributed/tensor/test_optimizers.py",),
        (Part("test_adam_1d or test_adamw_1d"),),
    ),
    Suite(
        "torch.distributed.checkpoint.state_dict",
        "torch",
        (f"{TORCH_TESTS}/distributed/checkpoint/test_state_dict.py",),
        (Part("TestStateDict"),),
        needs=2,
    ),
)


# --- one suite with one optimizer -------------------------------------------------------------------------------------


def outcomes(suite: Suite, optimizer: str, sources: Path, log: Path) -> dict[str, Any]:
    start = time.perf_counter()
    tests: dict[str, dict[str, str]] = {}
    classes, unfinished = set(), []
    for part in suite.parts:
        ranks = run(suite, part, optimizer, sources, log)
        for line in (line for lines in ranks for line in lines):
            if "optimizer" in line:
                classes.add(line["optimizer"])
            elif "test" in line:
                tests[line["test"]] = worst(line, tests.get(line["test"], line))
        if not all(map(finished, ranks)):
            unfinished.append(part.tests)
    counts = Counter(line["outcome"] for line in tests.values())
    failures = {test: line["message"] for test, line in tests.items() if line["outcome"] in FAILURES}
    reasons = {test: reason_of(test, message, optimizer) for test, message in failures.items()}
    return {
        "class": ", ".join(sorted(classes)),
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "failures": failures,
        "reasons": dict(Counter(filter(None, reasons.values()))),
        "unexpected": [test for test, reason in reasons.items() if reason is None],
        "unfinished": unfinished,
        "seconds": round(time.perf_counter() - start, 1),
    }


def reason_of(test: str, message: str, optimizer: str) -> str | None:
    """Why a failure was to be expected; None of one that was not."""
    text = f"{test.split('::')[-1]}: {' '.join(message.split())}"
    expected = EXPECTED | EXPECTED_OF.get(optimizer, {})
    return next((reason for pattern, reason in expected.items() if re.search(pattern, text)), None)


def run(suite: Suite, part: Part, optimizer: str, sources: Path, log: Path) -> list[list[dict[str, Any]]]:
    """What each rank's pytest has recorded."""
    files = [sources / name for name in suite.files]
    paths = [str(Path(__file__).parent), str(sources / "apex"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher(part.ranks), "-m", "pytest", "-v", "--tb=short"]
        # Neither this project's configuration, nor other conftest.py than those beside the tests.
        command += ["-c", os.devnull, f"--rootdir={files[0].parent}", f"--confcutdir={files[0].parent}"]
        command += ["-p", "no:cacheprovider", f"--timeout={SECONDS_PER_TEST}", "--timeout-method=thread"]
        command += ["-p", "peer_plugin", f"--peer={suite.peer}", f"--optimizer={optimizer}", f"--record={folder}"]
        command += [*map(str, files), "-k", part.tests]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ranks = [lines_of(Path(folder, f"rank{rank}")) for rank in range(part.ranks or 1)]
    with log.open("a") as file:
        file.write(f"=== {suite.name}, {optimizer}: {part.tests}\n{done.stdout}\n=== {done.returncode}\n\n")
    return ranks


def launcher(ranks: int) -> list[str]:
    if not ranks:
        return []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = [f"--nproc-per-node={ranks}", f"--master-port={port}", "--local-ranks-filter=0"]
    return ["-m", "torch.distributed.run", *flags]


def lines_of(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def finished(lines: list[dict[str, Any]]) -> bool:
    """Whether pytest came to its end, and had tests to run."""
    return bool(lines) and lines[-1].get("exitstatus") in (0, 1)


def worst(*lines: dict[str, str]) -> dict[str, str]:
    return max(lines, key=lambda line: OUTCOMES.index(line["outcome"]))


# --- all of them ------------------------------------------------------------------------------------------------------


def blob(path: Path) -> str:
    """As git names the file's content: `git log --find-object` finds the commits that have it."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lanes(suites: list[Suite]) -> list[list[tuple[Suite, str]]]:
    """What runs side by side. A peer's suites do not: some tests are skipped unless 60 GB of a GPU are free.

    The tests of several ranks write the same files, so they follow one another.
    """
    found: dict[tuple[str, bool], list[tuple[Suite, str]]] = {}
    for peer, optimizers in OPTIMIZERS.items():
        for optimizer in optimizers:
            for suite in suites:
                if suite.peer == peer:
                    found.setdefault((peer, bool(suite.ranks)), []).append((suite, optimizer))
    return list(found.values())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path, help="the folder with TransformerEngine/, apex/, pytorch/")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file; the log has its name with .log")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    options = parser.parse_args(arguments)
    options.sources = options.sources.resolve()
    options.gpus = torch.cuda.device_count()
    options.suites = [suite for suite in SUITES if suite.can_run(options.sources, options.gpus)]
    files = [name for suite in options.suites or SUITES for name in suite.files]
    missing = [name for name in files if not (options.sources / name).is_file()]
    if missing:
        parser.error(f"{options.sources / missing[0]} is missing; docs/contributing/testing.md says what belongs there")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    gpus, suites = options.gpus, options.suites
    results: dict[str, dict[str, Any]] = {suite.name: {} for suite in suites}
    report = {
        "machine": {**machine(torch.device("cuda" if gpus else "cpu"), options.commit), "gpus": gpus},
        "tests": {name: blob(options.sources / name) for suite in suites for name in suite.files},
        "expected_failures": EXPECTED,
        "expected_failures_of": EXPECTED_OF,
        "not_run": [suite.name for suite in SUITES if suite not in suites],
        "suites": results,
    }
    log = options.output.with_suffix(".log")
    write(report, options.output)
    log.write_text("")
    lock = threading.Lock()

    def run_lane(lane: list[tuple[Suite, str]]) -> None:
        for suite, optimizer in lane:
            found = outcomes(suite, optimizer, options.sources, log)
            with lock:
                results[suite.name][optimizer] = found
                write(report, options.output)
                show(suite.name, optimizer, found)

    with ThreadPoolExecutor() as pool:
        list(pool.map(run_lane, lanes(suites)))
    found = [found for by_optimizer in results.values() for found in by_optimizer.values()]
    return int(any(each["unexpected"] or each["unfinished"] for each in found))


def show(suite: str, optimizer: str, found: dict[str, Any]) -> None:
    counts = [f"{found[outcome]} {outcome}" for outcome in OUTCOMES if found[outcome]]
    counts += [f"not finished: {tests}" for tests in found["unfinished"]]
    print(f"{suite}, {optimizer}: {', '.join(counts)} ({found['seconds']} s)", flush=True)
    for test, message in found["failures"].items():
        print(f"  {test}: {' '.join(message.split())}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
