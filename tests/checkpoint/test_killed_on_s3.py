"""Processes that are killed while they save to S3: what was there is whole, and no save that was reported is lost.

The server is a process of its own, which stays. FUSED_OPTIM_TEST_KILLS says how many kills for each number of ranks.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import distributed
from checkpoint_cases import kill_one_rank
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.publish import MANIFEST
from killed_cases import Loss, check_newest, sharded, step_sharded

pytest.importorskip("s3fs")
boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.moto_server.werkzeug_app")

KILLS = int(os.environ.get("FUSED_OPTIM_TEST_KILLS", "2"))
KEEP = 2
SERVER = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server._server.server_port, flush=True)
sys.stdin.read()  # until the test ends
"""


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """By which clients find the server."""
    found = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as server:
        assert server.stdout is not None and server.stdin is not None
        found["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{int(server.stdout.readline())}"
        client(found).create_bucket(Bucket="bucket")
        yield found
        server.stdin.close()


def client(environment: Mapping[str, str]) -> Any:
    names = {"endpoint_url": "AWS_ENDPOINT_URL", "aws_access_key_id": "AWS_ACCESS_KEY_ID"}
    names |= {"aws_secret_access_key": "AWS_SECRET_ACCESS_KEY", "region_name": "AWS_DEFAULT_REGION"}
    return boto3.client("s3", **{name: environment[key] for name, key in names.items()})


def attempts(folder: str, environment: Mapping[str, str]) -> dict[str, set[str]]:
    """The names of the files of each, without this package."""
    prefix = folder.removeprefix("s3://bucket/") + "/"
    found: dict[str, set[str]] = {}
    for page in client(environment).get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix):
        for each in page.get("Contents", ()):
            name, _, file = each["Key"].removeprefix(prefix).partition("/")
            if file:
                found.setdefault(name, set()).add(file)
    return found


def save_forever(folder: str, reported: str, environment: Mapping[str, str]) -> None:
    """Notes each step that is said to be saved: of those that are waited for, two of three."""
    os.environ.update(environment)
    model, optimizer = sharded(0)
    loss = Loss()
    checkpointer = Checkpointer(model, optimizer, folder, extra={"loss": loss}, keep=KEEP, sigterm=False)
    for step in range(1, 10_000):
        step_sharded(model, optimizer, step)
        loss.value = step
        checkpointer.save(step)
        if step % 3:
            checkpointer.wait()
            if distributed.mesh().get_rank() == 0:
                with Path(reported).open("a") as file:
                    file.write(f"{step}\n")


def go_on(folders: list[str], environment: Mapping[str, str]) -> None:
    """The next run's first save."""
    os.environ.update(environment)
    for folder in folders:
        model, optimizer = sharded(1)
        loss = Loss()
        options: Any = {"extra": {"loss": loss}, "keep": KEEP, "sigterm": False}
        with Checkpointer(model, optimizer, folder, **options) as checkpointer:
            step = checkpointer.load_latest()
            assert step is not None
            checkpointer.save(step + 1)


@pytest.mark.long  # killed saves on disk: test_killed_saves.py; faults of S3: test_object_store.py
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_on_s3(ranks: int, environment: dict[str, str], tmp_path: Path) -> None:
    """Of one rank at any moment of a save or between two; the other is ended a little later."""
    chance, folders, drafts = random.Random(ranks), [], 0
    said, published = [], []
    for kill in range(KILLS):
        folders.append(f"s3://bucket/{ranks}-{kill}")
        reported = tmp_path / f"{ranks}-{kill}"
        kill_one_rank(save_forever, (folders[-1], str(reported), environment), reported, chance, ranks, within=1.0)
        found = attempts(folders[-1], environment)
        said.append(max(map(int, reported.read_text().split())))
        published.append(max(int(name[5:13]) for name, files in found.items() if MANIFEST in files))
        drafts += any(MANIFEST not in files for files in found.values())
    steps = check_newest(folders, environment)
    assert steps == published
    lost = sum(step < last for step, last in zip(steps, said, strict=True))
    assert lost == 0, (steps, said)
    distributed.run(1, go_on, folders, environment, timeout=60 + 5 * KILLS)
    for folder, step in zip(folders, steps, strict=True):
        found = attempts(folder, environment)
        assert all(MANIFEST in files for files in found.values()), found
        assert len(found) == KEEP and max(int(name[5:13]) for name in found) == step + 1
    figures = {"ranks": ranks, "kills": KILLS, "lost": lost, "during_a_save": drafts, "newest_steps": steps}
    print(json.dumps(figures))
