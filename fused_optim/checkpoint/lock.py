"""The lock of a run's folder: a file that the saving process writes anew every few seconds.

Nothing else tells that a run lives: containers repeat names of machines and numbers of processes, and clocks differ.
If the file has not changed for a minute, its run has ended, wherever that ran. If two runs begin at the same moment,
both write the file: the last one owns the folder, and the other one finds that out before it changes anything.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fused_optim.checkpoint.folders import Folder
from fused_optim.checkpoint.metadata import load_json

logger = logging.getLogger("fused_optim")

FILE = "fused_optim_run.json"
BEAT = 10.0  # seconds between writes
SILENCE, LOOK = 60.0, 1.0  # seconds without a write after which an owner is dead, and between looks at the file
_held: dict[str, Lock] = {}  # by place: what this process has


class Lock:
    """This process's lock of a folder, from :meth:`take` to :meth:`release`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._id = secrets.token_hex(16)
        self._about = {"host": socket.gethostname(), **_process(os.getpid()), "since": time.time()}
        self._beats = 0
        self._written = 0.0  # when, by a clock that goes on while the machine sleeps
        self.is_lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fused_optim run", daemon=True)

    def take(self) -> None:
        """Take the lock: at once if it is free or its owner has ended, else once the owner is silent for a minute.

        Raises ValueError if the owner lives.
        """
        seen, looks = None, 0
        while (content := self._read()) is not None and not _has_ended(content):
            if seen is not None and content != seen:
                raise ValueError(
                    f"{self._folder} belongs to another run, {_described(content)}, which is alive: end that one, or "
                    "give this one a folder of its own; to only read this one, open it with readonly=True"
                )
            if looks * LOOK >= SILENCE:  # not by the clock, which goes on while this process is stopped
                logger.warning("%s is taken over: %s has been silent", self._folder, _described(content))
                break
            seen, looks = content, looks + 1
            time.sleep(LOOK)
        self._write()
        try:
            self._thread.start()
        except BaseException:  # the system has no thread left
            self._folder.remove(FILE)
            raise

    def check(self) -> None:
        """Raise ValueError where another run has taken the folder over: nothing in it is to be changed any more."""
        content = self._read()
        if content is None and not self.is_lost and _now() - self._written < SILENCE:  # nobody can have had it
            self._write()
        elif self.is_lost or content is None or _parsed(content).get("id") != self._id:
            self.is_lost = True
            owner = "nobody" if content is None else _described(content)
            raise ValueError(
                f"{self._folder} was taken over while this process was silent, and belongs to {owner} now: nothing is "
                "saved there any more; end this run, or let it save to another folder"
            )

    def release(self) -> None:
        self._released.set()
        if self._thread.is_alive():
            self._thread.join(BEAT)
        with suppress(OSError, ValueError):
            self.check()
            self._folder.remove(FILE)

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            try:
                self.check()
                self._write()
            except ValueError as error:
                logger.error("%s", error)
                return
            except Exception:  # a disk that is full, a store that does not answer: it may be another time
                logger.warning("%s: this run could not say that it is alive", self._folder, exc_info=True)

    def _read(self) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._folder.read(FILE)
        return None

    def _write(self) -> None:
        self._beats += 1
        content = json.dumps({"id": self._id, **self._about, "beats": self._beats})
        self._folder.write(FILE, content.encode(), sync=False)
        self._written = _now()


def hold(folder: Folder) -> Lock:
    """This process's lock of a folder. Raises as :meth:`Lock.take` does."""
    with suppress(ValueError):  # an earlier Checkpointer may have lost it
        if (lock := _held.get(folder.place)) is not None:
            lock.check()
            return lock
    _register()
    lock = Lock(folder)
    lock.take()
    _held[folder.place] = lock
    return lock


def release(folder: Folder) -> None:
    """Release this process's lock of a folder, if it has one."""
    if (lock := _held.pop(folder.place, None)) is not None:
        lock.release()


def release_all() -> None:
    """Release all locks, at the end of the process and after its saves."""
    while _held:
        _held.popitem()[1].release()


def _leave_to_parent() -> None:
    """A child that was forked has none of the threads, and none of the locks."""
    for lock in _held.values():
        lock.is_lost = True
    _held.clear()


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_leave_to_parent)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _process(pid: int) -> dict[str, Any]:
    """Facts that identify a process: pid and, on Linux, boot, pid namespace and start time."""
    facts: dict[str, Any] = {"pid": pid}
    with suppress(OSError):
        facts["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        facts["namespace"] = os.readlink("/proc/self/ns/pid")
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        facts["started"] = None if state in "ZX" else fields[18]
    return facts


def _has_ended(content: bytes) -> bool:
    """True if the owner is known to have ended, or was this process; False if that cannot be seen from here."""
    owner, this = _parsed(content), _process(os.getpid())
    pid = owner.get("pid")
    if type(pid) is not int or pid <= 0 or "started" not in this:
        return False
    if any(owner.get(key) != this[key] for key in ("boot", "namespace")):
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)  # else it is another user's
    return pid == this["pid"] or owner.get("started") != _process(pid).get("started")


def _parsed(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):  # torn
        return load_json(content, FILE)
    return {}


def _described(content: bytes) -> str:
    owner = _parsed(content)
    since = owner.get("since")
    known = isinstance(since, float) and 0 <= since < 1e11
    text = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    return f"{text} since {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(since))}" if known else text
