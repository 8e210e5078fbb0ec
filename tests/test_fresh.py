"""Programs of ``support/fresh.py`` run as Python would run them, and with torch there already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 5), (signal.SIGKILL, -9)])
def test_signals_reach_the_program(number: int, status: int) -> None:
    """Of SIGKILL it does not know; it is killed all the same."""
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([fresh.python(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait() == status
    wait_for_end(child)


def wait_for_end(process: int) -> None:
    until = time.monotonic() + 30
    while Path(f"/proc/{process}/exe").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.usefixtures("forked_python")
def test_what_they_start_has_torch_too() -> None:
    code = "import sys; print('torch' in sys.modules, sys.executable)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    assert done.stdout == f"True {fresh.python()}\n"


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        fresh.run("import time; time.sleep(60)", timeout=0.5)


def test_a_server_that_ends_is_no_success() -> None:
    """The program ends with it."""
    code = "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(60)"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([fresh.python(), "-c", code], text=True, **streams) as process:
        assert process.stdout is not None
        server, child = map(int, process.stdout.readline().split())
        os.kill(server, signal.SIGKILL)
        assert "has ended" in process.communicate(timeout=30)[1] and process.returncode == 1
    wait_for_end(child)
