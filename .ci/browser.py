"""A headless Chromium, spoken to through pipes in its DevTools protocol: nothing else is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
OPTIONS += ["--allow-file-access-from-files=false", "--no-first-run", "--disable-dev-shm-usage"]


class Browser:
    """One tab. ``requested``: all addresses that it has asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.count, self.unread, self.session = 0, b"", ""
        self.requested: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises RuntimeError with what the browser says."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            some = os.read(self.answers, 1 << 16)
            if not some:
                raise RuntimeError("the browser has ended")
            self.unread += some
        first, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        self.loaded |= message.get("method") == "Page.loadEventFired"
        return message

    def show(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window and the colours that the system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.loaded = False
        self.call("Page.navigate", url=address)
        while not self.loaded:
            self.receive()

    def evaluate(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """Raises FileNotFoundError where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise FileNotFoundError("no Chromium: apt-get install chromium")
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        start = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "_", program]
        process = subprocess.Popen(
            [*start, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_read, from_write):
            os.close(end)
        try:
            yield Browser(to_write, from_read)
        finally:
            process.terminate()
            process.wait()
            for end in (to_write, from_read):
                os.close(end)
