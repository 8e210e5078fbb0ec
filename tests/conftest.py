"""Fixtures, those of ``support/common_fixtures.py``, in processes that run tests.

That of pytest-xdist which hands tests out needs none, nor torch, which takes seconds to import before anything starts.
"""

from __future__ import annotations

import os

import pytest

# In the processes that tests start, too. Where several share the cores, threads of OpenMP wait for each other most of
# the time, and keep the cores busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("common_fixtures")
