"""Starts programs as new processes, without importing torch for each: forked from processes that have, and do no more.

``python()`` is started as ``sys.executable`` is, and does what that does with ``-c``, ``-m`` or a script. Of open files
the process gets stdin, stdout and stderr. What is read when modules are imported, or before that, such as variables
of the C library's malloc, has been read.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import fork_server

# What fused_optim imports of torch takes longer to import than fused_optim itself.
TORCH = ("torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor")
# What programs of tests import, most of them: the package, and what FSDP2 and checkpoints use of torch.
PACKAGE = (
    "fused_optim.checkpoint",
    "fused_optim.quantized",
    "hypothesis",
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
)

REAL = sys.executable  # which tests replace by ours

# Asks the server for a process, and waits in its place: passes on signals, and ends as it does.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
SIGNALS = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it is known whom they are for
request = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "program": __file__}}
message = json.dumps(request).encode()
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [len(message).to_bytes(8)], [0, 1, 2])
server.sendall(message)
def received(child=None):
    found = server.recv(8, socket.MSG_WAITALL)
    if len(found) < 8:  # else it would look like a program that has succeeded
        if child is not None:
            os.kill(child, signal.SIGKILL)
        sys.exit("the process that started the program, or was to do so, has ended")
    return int.from_bytes(found, signed=True)
child = received()
for number in SIGNALS:
    signal.signal(number, lambda number, _: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
status = received(child)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def python(imported: tuple[str, ...] = PACKAGE, paths: tuple[str, ...] = ()) -> str:
    """The path of an executable: Python, in which the modules ``imported`` are there already.

    ``paths``: where these are looked for, and ``sitecustomize``, before the paths of this process.
    """
    folder = Path(tempfile.mkdtemp(prefix="fresh-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = folder / "python"
    program.write_text(CLIENT.format(python=REAL, address=str(folder / "server")))
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "server"))
        listener.listen(100)
        command = [REAL, fork_server.__file__, str(listener.fileno()), *imported]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *sys.path]), "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    atexit.register(server.kill)
    return str(program)


def run(
    code: str,
    *arguments: object,
    imported: tuple[str, ...] = PACKAGE,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """``python -c code *arguments``. Raises TimeoutExpired, after which the process is killed."""
    command = [python(imported), "-c", code, *map(str, arguments)]
    environment = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def torchrun(ranks: int, *command: str | Path, folder: Path, timeout: float = 250.0) -> str:
    """What ``torchrun --nproc-per-node ranks *command`` prints, run in ``folder`` on CPUs. Raises if it fails."""
    launcher = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launcher, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
