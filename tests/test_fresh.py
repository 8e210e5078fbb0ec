"""Programs of ``support/fresh.py`` run as Python would run them, and with torch there already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fresh

SAYS = "import json, os, sys; print(json.dumps([sys.argv, os.getcwd(), os.environ.get('HERE'), __name__]))"


def printed(*arguments: str, folder: Path, **environment: str) -> tuple[str, str]:
    """By the one and the other Python."""
    of_each = []
    for program in (sys.executable, fresh.python()):
        done = subprocess.run(
            [program, *arguments], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert not done.stderr
        of_each.append(done.stdout)
    return of_each[0], of_each[1]


@pytest.mark.parametrize("how", [["-c", SAYS], ["said.py"], ["-m", "said"], ["-u", "said.py"], ["-m", "elsewhere"]])
def test_programs_see_what_they_would(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(SAYS)
    (tmp_path / "paths").mkdir()
    (tmp_path / "paths" / "elsewhere.py").write_text(SAYS)
    expected, found = printed(*how, "a", "--b=c d", folder=tmp_path, HERE="there", PYTHONPATH=str(tmp_path / "paths"))
    assert found == expected and '"there"' in found and '"__main__"' in found


@pytest.mark.parametrize(
    "code, status", [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)]
    + [(f"os.kill(os.getpid(), {number})", -number) for number in (signal.SIGTERM, signal.SIGKILL)],
)  # fmt: skip
def test_the_status_is_that_of_the_program(code: str, status: int) -> None:
    done = fresh.run(f"import atexit, os, sys\natexit.register(print, 'ends')\n{code}")
    assert done.returncode == status and ("ends" in done.stdout) == (status >= 0), done.stderr
    assert ("ValueError" in done.stderr) == (status == 1)
