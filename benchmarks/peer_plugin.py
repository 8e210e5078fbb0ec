"""A plugin of pytest, for tests of others: one of this package's classes in the place of a peer's FusedAdam.

``peer_suites.py`` starts pytest with it, and reads the outcomes, of which every rank writes a file. A line is written
as soon as a test has ended, so that none is lost if a later one ends the process.

In torch's tests, ``torch.optim.Adam`` and ``AdamW`` are replaced, also in the tables that most of these tests go
through, and in the processes that they start.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

# The module that programs and tests take the optimizers from.
PLACES = {
    "transformer_engine": "transformer_engine.pytorch.optimizers",
    "apex": "apex.optimizers",
    "torch": "torch.optim",
}
# "supported": as "own", without the options that are documented as not supported.
OPTIMIZERS = {
    "transformer_engine": ("own", "drop_in", "theirs"),
    "apex": ("own", "drop_in", "theirs"),
    "torch": ("own", "supported", "theirs"),
}
UNSUPPORTED = ("amsgrad", "differentiable")
MESSAGE = 1000  # characters
_CHOSEN = "PEER_PLUGIN_OPTIMIZER"  # which of them, for processes that a test starts


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("a peer's optimizer")
    group.addoption("--peer", choices=list(PLACES), help="whose FusedAdam")
    group.addoption("--optimizer", choices=sorted({each for own in OPTIMIZERS.values() for each in own}))
    group.addoption("--record", type=Path, help="the folder for a file of each rank")


def pytest_configure(config: pytest.Config) -> None:
    peer, optimizer = config.getoption("--peer"), config.getoption("--optimizer")
    place = importlib.import_module(PLACES[peer])
    if peer == "torch":
        replace_torchs(optimizer)
        os.environ[_CHOSEN] = optimizer
        prepare = spawn.get_preparation_data
        spawn.get_preparation_data = lambda name: {**prepare(name), "init_main_from_name": __name__}
    elif optimizer != "theirs":
        module = {"own": "fused_optim", "drop_in": f"fused_optim.compat.{peer}"}[optimizer]
        place.FusedAdam = importlib.import_module(module).FusedAdam
    classes = [place.Adam, place.AdamW] if peer == "torch" else [place.FusedAdam]
    config.pluginmanager.register(Record(config, classes), "record")


def replace_torchs(optimizer: str) -> None:
    import torch
    from torch.testing._internal.common_optimizers import optim_db

    if optimizer == "theirs":
        return

    ours = torchs_with_ours(without=UNSUPPORTED if optimizer == "supported" else ())
    for info in optim_db:
        info.optim_cls = ours.get(info.optim_cls.__name__, info.optim_cls)
    for name, replacement in ours.items():
        setattr(torch.optim, name, replacement)


def torchs_with_ours(without: tuple[str, ...]) -> Mapping[str, type]:
    """torch.optim's classes by their names, which tests ask for: with torch's arguments, defaults and state dicts."""
    from fused_optim import FusedAdam, FusedAdamW

    def given(options: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key not in without}

    class Adam(FusedAdam):
        def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
            options = {"decoupled_weight_decay": False, "checkpoint_format": "torch", **given(options)}
            super().__init__(params, *arguments, **options)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(given(param_group))

    class AdamW(FusedAdamW):
        def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(params, *arguments, **{"checkpoint_format": "torch", **given(options)})

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(given(param_group))

    return {"Adam": Adam, "AdamW": AdamW}


class Record:
    def __init__(self, config: pytest.Config, optimizers: list[type]) -> None:
        self.config = config
        self.path = config.getoption("--record") / f"rank{os.environ.get('RANK', 0)}"
        for optimizer in optimizers:
            self.write(optimizer=name_of(optimizer))

    def write(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self.config.hook.pytest_report_teststatus(report=report, config=self.config)[0]
        if outcome:  # there is none for a setup or teardown that passes
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext
            self.write(test=report.nodeid, outcome=outcome, message=shortened(message.strip()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.write(exitstatus=int(exitstatus))
        session.exitstatus = 0  # torchrun ends all other ranks when one fails


def shortened(message: str) -> str:
    """Both ends: of an error in another process, whose message is a traceback, the last line says what it was."""
    half = MESSAGE // 2
    return message if len(message) <= MESSAGE else f"{message[:half]} ... {message[-half:]}"


def name_of(optimizer: type) -> str:
    """Of a class that is made here the one that it is made of."""
    own = optimizer.__mro__[1] if optimizer.__module__ == __name__ else optimizer
    return f"{own.__module__}.{own.__qualname__}"


if __name__ == "__mp_main__":  # in a process that a test has started
    replace_torchs(os.environ[_CHOSEN])
