"""A Checkpointer on S3: a real server (moto's), real clients, and what goes wrong between them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest
import torch

import cases
import fresh
from fused_optim.checkpoint import Checkpointer, folders
from fused_optim.checkpoint.folders import folder_at
from native_cases import build, train, trained
from pairwise import each_once

s3fs, boto3 = pytest.importorskip("s3fs"), pytest.importorskip("boto3")
moto = pytest.importorskip("moto.moto_server.werkzeug_app")
serving = pytest.importorskip("werkzeug.serving")

REM16 = cases.MASTER["bfloat16+rem16"]
KEYS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}
Fault = Callable[[str, str], str | None]  # method and path -> the status that is answered instead


class Server:
    """S3, with a fault that requests may meet, and listings that are ``lag`` seconds late."""

    def __init__(self) -> None:
        self.fault: Fault = lambda method, path: None
        self.lag, self.delay = 0.0, 0.0
        self.requests: list[tuple[str, str]] = []
        self._written: dict[str, float] = {}
        self._app = moto.DomainDispatcherApplication(moto.create_backend_app)
        self._server = serving.make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING", "")
        self.requests.append((method, f"{path}?{query}"))
        time.sleep(self.delay)
        if status := self.fault(method, f"{path}?{query} {environ.get('HTTP_RANGE', '')}"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(status, [("Content-Length", "0")])
            return [b""]
        if method == "PUT":
            self._written[path.partition("/")[2].partition("/")[2]] = time.monotonic()
        answer = b"".join(self._app(environ, start))
        if method == "GET" and "list-type" in query and self.lag:
            answer = re.sub(rb"<Contents>.*?</Contents>", self._late, answer, flags=re.DOTALL)
        return [answer]

    def _late(self, match: re.Match[bytes]) -> bytes:
        key = re.search(rb"<Key>(.*?)</Key>", match[0])
        assert key is not None
        is_late = time.monotonic() - self._written.get(key[1].decode(), 0) < self.lag
        return b" " * len(match[0]) if is_late else match[0]

    def settle(self) -> None:
        """What was written until now is listed, whatever ``lag`` is."""
        self._written.clear()

    def stop(self) -> None:
        self._server.shutdown()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    boto3.client("s3", endpoint_url=server.url, aws_access_key_id="x", aws_secret_access_key="x").create_bucket(
        Bucket="bucket"
    )
    yield server
    server.stop()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for key, value in {**KEYS, "AWS_ENDPOINT_URL": running.url}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(folders, "_PAUSE", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # of its own, which wait long
    running.requests.clear()
    yield running
    running.fault, running.lag, running.delay = lambda method, path: None, 0.0, 0.0


def checked(folder: str, step: int) -> None:
    """The checkpoint of a step, loaded by a new run, is the state of that step."""
    model, optimizer = build(REM16, torch.int8, fresh=True)
    with Checkpointer(model, optimizer, folder, readonly=True) as reader:
        assert reader.load_latest() == step
    expected, other = trained(REM16, torch.int8)
    train(expected, other, range(2, step))
    assert all(torch.equal(model[name], param) for name, param in expected.items())


def test_saves_and_loads(server: Server) -> None:
    folder = "s3://bucket/usual"
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, folder, keep=2, sigterm=False) as checkpointer:
        for step in (2, 3, 4):
            checkpointer.save(step)
            checkpointer.wait()
            train(model, optimizer, range(step, step + 1))
        assert checkpointer.steps() == [4, 3]
    assert len(folder_at(folder).names()) == 2
    checked(folder, 4)


STATUS = ["500 Internal Server Error", "503 Slow Down"]


@pytest.mark.parametrize("status, method", each_once(product(STATUS, ["PUT", "GET", "HEAD"])))
def test_what_fails_now_and_then_is_tried_again(status: str, method: str, server: Server) -> None:
    folder, met = f"s3://bucket/{method}{status[:3]}", []

    def now_and_then(asked: str, path: str) -> str | None:
        if asked != method:
            return None
        met.append(path)
        return status if met.count(path) == 1 else None

    model, optimizer = trained(REM16, torch.int8)
    server.fault = now_and_then
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        checkpointer.save(2)
    checked(folder, 2)
    assert len(met) > (0 if method == "HEAD" else 3)


# The first and the last file of a save; the others fail between them.


@pytest.mark.parametrize(
    "suffix", [".distcp", "fused_optim_checkpoint.json", pytest.param(".metadata", marks=pytest.mark.long)]
)
def test_what_fails_for_good_is_said_and_changes_nothing(suffix: str, server: Server) -> None:
    folder = f"s3://bucket/good{suffix.replace('.', '')}"
    model, optimizer = trained(REM16, torch.int8)
    checkpointer = Checkpointer(model, optimizer, folder, keep=1, sigterm=False)
    checkpointer.save(2)
    checkpointer.wait()
    before = sorted(folder_at(folder).names())
    server.fault = lambda method, path: (
        "500 Internal Server Error" if method in ("PUT", "POST") and suffix in path else None
    )
    train(model, optimizer, range(2, 3))
    checkpointer.save(3)
    with pytest.raises(RuntimeError, match="saving step 3 to"):
        checkpointer.wait()
    assert sorted(folder_at(folder).names()) == before
    checked(folder, 2)
    server.fault = lambda method, path: None
    checkpointer.save(3)
    checkpointer.close()
    checked(folder, 3)
    assert len(folder_at(folder).names()) == 1


def test_a_file_that_the_store_has_lost(server: Server) -> None:
    """It answered that it has it."""
    folder = "s3://bucket/lost"
    model, optimizer = trained(REM16, torch.int8)
    checkpointer = Checkpointer(model, optimizer, folder, keep=1, sigterm=False)
    checkpointer.save(2)
    checkpointer.wait()
    server.fault = lambda method, path: "200 OK" if method in ("PUT", "POST") and ".distcp" in path else None
    train(model, optimizer, range(2, 3))
    checkpointer.save(3)
    with pytest.raises(RuntimeError, match=r"saving step 3 to .* failed"):
        checkpointer.close()
    server.fault = lambda method, path: None
    checked(folder, 2)


def test_listings_that_are_late(server: Server) -> None:
    folder, server.lag = "s3://bucket/late", 1.0
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, folder, keep=2, sigterm=False) as checkpointer:
        for step in (2, 3, 4):
            checkpointer.save(step)
            checkpointer.wait()
            train(model, optimizer, range(step, step + 1))
    time.sleep(server.lag)
    checked(folder, 4)
    with Checkpointer(model, optimizer, folder, readonly=True) as reader:
        numbers = [found.manifest.number for found in reader._list() if found.manifest is not None]
    assert numbers == sorted(set(numbers), reverse=True) and len(numbers) >= 2


def test_listings_that_are_late_for_some_files_of_a_folder(server: Server) -> None:
    """The client keeps a listing that is not empty, and would answer from it for files that it lacks."""
    folder = folder_at("s3://bucket/partly")
    folder.write("first", b"1")
    server.settle()
    server.lag = 60.0
    folder.write("second", b"22")
    assert folder.sizes() == {"first": 1}
    assert (folder.size("first"), folder.size("second"), folder.size("third")) == (1, 2, None)


@pytest.mark.long
def test_the_end_of_the_process(server: Server) -> None:
    code = """
import torch
from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer
model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(8, 128)) for _ in range(20)])
Checkpointer(model, FusedAdamW(model.parameters()), "s3://bucket/end").save(1)
"""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(8, 128)) for _ in range(20)])
    from fused_optim import FusedAdamW

    with Checkpointer(model, FusedAdamW(model.parameters()), "s3://bucket/end", readonly=True) as reader:
        assert reader.load_latest() == 1 and all(bool((param == 1).all()) for param in model)


def test_requests_do_not_grow_with_what_is_there(server: Server) -> None:
    """A save asks for the names of older checkpoints, once for the manifests of those that others wrote."""
    model, optimizer = trained(REM16, torch.int8)
    asked = []
    with Checkpointer(model, optimizer, "s3://bucket/many", keep=None, sigterm=False) as checkpointer:
        for step in range(2, 12):
            server.requests.clear()
            checkpointer.save(step)
            checkpointer.wait()
            asked.append(len(server.requests))
    assert max(asked[3:]) <= asked[2] + 2, asked
