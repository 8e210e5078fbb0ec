"""A plugin of pytest, for tests of others: one of this package's classes in the place of a peer's FusedAdam.

``peer_suites.py`` starts pytest with it, and reads the outcomes, of which every rank writes a file. A line is written
as soon as a test has ended, so that none is lost if a later one ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

# The module that programs and tests take FusedAdam from.
PLACES = {"transformer_engine": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}
OPTIMIZERS = ("own", "drop_in", "theirs")
MESSAGE = 1000  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("a peer's optimizer")
    group.addoption("--peer", choices=list(PLACES), help="whose FusedAdam")
    group.addoption("--optimizer", choices=OPTIMIZERS, help="what is put in its place")
    group.addoption("--record", type=Path, help="the folder for a file of each rank")


def pytest_configure(config: pytest.Config) -> None:
    place = importlib.import_module(PLACES[config.getoption("--peer")])
    ours = {"own": "fused_optim", "drop_in": f"fused_optim.compat.{config.getoption('--peer')}"}
    if config.getoption("--optimizer") in ours:
        place.FusedAdam = importlib.import_module(ours[config.getoption("--optimizer")]).FusedAdam
    config.pluginmanager.register(Record(config, place.FusedAdam), "record")


class Record:
    def __init__(self, config: pytest.Config, optimizer: type) -> None:
        self.config = config
        self.path = config.getoption("--record") / f"rank{os.environ.get('RANK', 0)}"
        self.write(optimizer=f"{optimizer.__module__}.{optimizer.__qualname__}")

    def write(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self.config.hook.pytest_report_teststatus(report=report, config=self.config)[0]
        if outcome:  # there is none for a setup or teardown that passes
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext
            self.write(test=report.nodeid, outcome=outcome, message=message.strip()[:MESSAGE])

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.write(exitstatus=int(exitstatus))
        session.exitstatus = 0  # torchrun ends all other ranks when one fails
