"""Runs code as new processes do, without importing torch for each: forked from processes that have, and do no more.

Children end as interpreters do, with exit handlers and threads that are waited for.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Reads requests and forks for each. A child leaves the loop, and goes on below it.
SERVER = """
import gc, importlib, json, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
def begin(request):
    for stream, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["arguments"]]
    return request["code"]
def serve():
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return begin(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)
gc.collect()
gc.freeze()  # children neither copy nor look at what is there already
code = serve()
globals().update(dict.fromkeys(["begin", "serve"]))
exec(compile(code, "<string>", "exec"), globals())
"""


@functools.cache
def _server(imported: tuple[str, ...]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-c", SERVER, *imported], env=environment, text=True, **pipes)
    atexit.register(server.kill)
    return server


def run(
    code: str,
    *arguments: object,
    imported: tuple[str, ...] = ("torch",),
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """``python -c code *arguments`` in a process in which the modules ``imported`` are there already.

    Raises TimeoutError, after which the process is killed.
    """
    server = _server(imported)
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder, name) for name in ("stdout", "stderr")}
        for path in outputs.values():
            path.touch()
        request = {"code": code, "arguments": list(map(str, arguments)), "environment": dict(environment or {})}
        server.stdin.write(json.dumps(request | {name: str(path) for name, path in outputs.items()}) + "\n")
        server.stdin.flush()
        child, killed = int(server.stdout.readline()), threading.Event()
        timer = threading.Timer(timeout, lambda: (killed.set(), os.kill(child, signal.SIGKILL)))
        timer.start()
        status = int(server.stdout.readline())
        timer.cancel()
        if killed.is_set():
            raise TimeoutError(f"no end after {timeout} s: {outputs['stderr'].read_text()}")
        stdout, stderr = (path.read_text() for path in outputs.values())
    return subprocess.CompletedProcess(["python", "-c", code], status, stdout, stderr)
