"""Who writes a draft: others leave it alone as long as that process lives."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.untrusted import load_json, number_in

FILE = "fused_optim_writer.json"
FORSAKEN = 86400.0  # seconds after which a draft of another machine, of whose processes nothing is known, is nobody's


def write(folder: Folder) -> None:
    """This process writes here."""
    folder.write(FILE, json.dumps({**_this_process(), "time": time.time()}).encode())


def other_writer(folder: Folder) -> str | None:
    """Another process that lives and writes here, for messages. None where no draft says who writes it."""
    try:
        owner = load_json(folder.read(FILE), f"{folder}/{FILE}")
        host, pid, since = str(owner["host"]), number_in(owner, "pid", FILE), float(owner["time"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # torn: whoever wrote it has ended
        return None
    this = _this_process()
    if host == this["host"]:
        is_living = pid != this["pid"] and owner.get("started") == _started(pid) is not None
    else:
        is_living = time.time() - since < FORSAKEN
    return f"process {pid} on {host.partition(' ')[0]}" if is_living else None


def _this_process() -> dict[str, Any]:
    """The host by a name that two machines do not share, nor two containers whose processes have their own numbers."""
    host = [socket.gethostname()]
    with suppress(OSError):
        host.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        host.append(os.readlink("/proc/self/ns/pid"))
    return {"host": " ".join(host), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str | None:
    """When a process began, which tells it from a later one of its number; None where none runs."""
    if not Path("/proc/self/stat").exists():
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return ""
        return None
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    return None
