"""A process of ``fresh.py``: imports modules once, and forks for each request what Python would start anew.

Children end as interpreters do, with exit handlers and threads that are waited for.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from pathlib import Path


def serve(listener: socket.socket) -> list[str]:
    """Waits for requests, until stdin ends. Returns in children, with the arguments of Python."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            return attend(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def attend(connection: socket.socket) -> list[str]:
    """Waits for the child, for the program that asked for it; kills the child if that program has ended."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as file:
        request = json.loads(file.read(int.from_bytes(size)))
    child = os.fork()
    if not child:
        connection.close()
        begin(request, streams)
        arguments: list[str] = request["arguments"]
        return arguments
    for stream in streams:
        os.close(stream)
    connection.sendall(child.to_bytes(8))
    if connection in select.select([connection, os.pidfd_open(child)], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, signed=True))
    os._exit(0)


def begin(request: dict[str, object], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.executable = request["program"]  # what the child starts with it is forked, too
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]


def run(arguments: list[str]) -> None:
    """As ``python *arguments``: ``-u`` and then ``-c``, ``-m`` or a script."""
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    how, *others = arguments
    sys.orig_argv = [sys.executable, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if how == "-m":
        name, *others = others
        sys.argv = ["-m", *others]  # as it is until the module is found
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif how == "-c":
        code, *others = others
        sys.argv = ["-c", *others]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif how.startswith("-"):
        raise ValueError(f"{how}: an option that is not known here; start sys.executable")
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(how).resolve().parent))
        main.__file__ = how
        exec(compile(Path(how).read_bytes(), how, "exec"), vars(main))


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder
    for imported in sys.argv[2:]:
        importlib.import_module(imported)
    gc.collect()
    gc.freeze()  # children neither copy nor look at what is there already
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
