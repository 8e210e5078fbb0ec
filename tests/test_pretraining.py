"""``benchmarks/pretraining.py``: the text and its split, runs that are stopped and go on, queue, report, errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import corpus
import pretraining
from corpus import HELD_OUT_EVERY, Source, prepare
from pretraining import STOPPED, Windows, parse_args
from pretraining_runs import RUNS, Trainee

CPU = torch.device("cpu")
SHAPE = (1, 128, 384)  # sizes that all FP8 products take
TINY = "--device cpu --vocabulary 384 --layers 1 --width 64 --batch 2 --context 32 --steps 6 --evaluations 2"
TINY += " --evaluation-batches 1 --final-batches 1 --error-steps 4 --points 3"
PEERS = {"flash", "torchao", "bitsandbytes"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A hundred different files, one of them twice, one that is no text, and one by a link."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(100):
        (folder / f"{i}.py").write_text(f"# file {i}\n" + "x = [1, 2, 3]\n" * (10 + i))
    (folder / "again.py").write_bytes((folder / "7.py").read_bytes())
    (folder / "binary.txt").write_bytes(bytes(range(128, 256)) * 4)
    (folder / "other.bin").write_text("x" * 100)
    (folder / "linked.py").symlink_to(folder / "8.py")
    return folder


def arguments(texts: Path, *more: str) -> list[str]:
    folder = texts.parent
    return [
        *TINY.split(),
        "--text",
        str(texts),
        "--cache",
        str(folder / "cache"),
        "--output",
        str(folder / "runs"),
        *more,
    ]


def test_files_count_once_and_are_held_out_by_file(texts: Path, tmp_path: Path) -> None:
    text = prepare(Source([texts, texts], 384), tmp_path / "cache")
    assert text.facts["files"] == {"held_out": 100 // HELD_OUT_EVERY, "train": 98}
    files = {path.read_bytes() for path in texts.glob("*.py")}
    parts = [bytes((text - 1).astype(np.uint8)) for text in (text.train, text.held_out)]
    found = [{part for part in whole.split(b"\xff") if part} for whole in parts]  # the end token is 0
    assert found[0] | found[1] == files and not found[0] & found[1] and len(found[1]) == 2
    assert sum(text.facts["bytes"].values()) == sum(map(len, files))


def test_text_is_read_once_and_again_for_other_options(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(Source([texts], 384), tmp_path / "cache")
    monkeypatch.setattr(corpus, "read_all", lambda *_: pytest.fail("read again"))
    again = prepare(Source([texts], 384), tmp_path / "cache")
    assert first.facts == again.facts and np.array_equal(first.train, again.train)
    with pytest.raises(pytest.fail.Exception, match="read again"):
        prepare(Source([texts], 384, max_bytes=10_000), tmp_path / "cache")


def test_a_tokenizer_gives_the_text_back(texts: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    text = prepare(Source([texts], 640), tmp_path / "cache")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "cache" / "tokenizer.json"))
    files = np.split(text.held_out, np.flatnonzero(text.held_out == corpus.END) + 1)
    decoded = {tokenizer.decode(file[:-1].tolist()) for file in files if len(file)}
    assert len(decoded) == 2 and decoded <= {path.read_text() for path in texts.glob("*.py")}
    assert text.facts["tokens"]["train"] < 0.8 * text.facts["bytes"]["train"]


def test_windows_cover_each_epoch_once_and_differ_by_seed() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    windows = Windows(tokens, 10, 7, 0, CPU)
    assert windows.count == 99 and windows.steps == 14
    epochs = [torch.cat([windows[epoch * 14 + i] for i in range(14)]) for epoch in range(2)]
    for epoch in epochs:
        assert epoch.shape == (98, 11) and bool((epoch.diff() == 1).all())
        assert len(epoch[:, 0].unique()) == 98 and len((epoch[:, 0] % 10).unique()) == 1
    assert not torch.equal(*epochs)
    assert torch.equal(windows[3], Windows(tokens, 10, 7, 0, CPU)[3])
    assert not torch.equal(windows[3], Windows(tokens, 10, 7, 1, CPU)[3])
    spread = torch.cat([*windows.spread(2)])
    assert spread.shape == (14, 11) and spread[0, 0] == 0 and spread[-1, -1] == 999


@pytest.mark.parametrize("name", [name for name in RUNS if name not in PEERS])
def test_every_run_learns(name: str) -> None:
    trainee = Trainee(RUNS[name], CPU, SHAPE, 1e-2)
    tokens = torch.arange(33).repeat(4, 1) + 100
    losses = [(trainee.backward(tokens).item(), trainee.step(1.0))[0] for _ in range(8)]
    assert losses[0] > 5.5 and losses[-1] < losses[0] - 1


def test_runs_of_a_seed_begin_alike() -> None:
    loss = {
        name: Trainee(RUNS[name], CPU, SHAPE, 1e-2).model(torch.arange(17)[None]).item()
        for name in RUNS
        if name not in PEERS
    }
    assert len({value for name, value in loss.items() if not RUNS[name].seed and "products" not in name}) == 1
    assert loss["fp32-seed1"] != loss["fp32"]
    assert all(value == pytest.approx(loss["fp32"], rel=1e-2) for value in loss.values())


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM arrives in a step."""
    step, done = Trainee.step, []

    def stopping(self: Trainee, share: float) -> None:
        step(self, share)
        done.append(share)
        if len(done) == steps:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainee, "step", stopping)


def result(texts: Path, name: str) -> Any:
    return json.loads((texts.parent / "runs" / f"{name}.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["fp32", "remainder8-int8", "no-master-int8", "products-tensor", "muon-torch", "muon-int8-seed1"]
)
def test_a_stopped_run_goes_on(name: str, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_args(["train", name, *arguments(texts)])
    assert pretraining.train(args) == 0
    straight = result(texts, name)
    (texts.parent / "runs" / f"{name}.json").unlink()
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        assert pretraining.train(args) == STOPPED
    stopped = json.loads((texts.parent / "runs" / f"{name}.partial.json").read_text())
    assert stopped["steps"] == 4 and stopped["training"][-1][0] == 4
    assert pretraining.train(args) == 0
    resumed = result(texts, name)
    assert resumed["resumed"] == [4]
    for key in ("held_out_loss", "training", "held_out", "steps", "trained_tokens"):
        assert resumed[key] == straight[key], key
    left = {path.name for path in (texts.parent / "runs").iterdir()}
    assert left == {f"{name}.json"}
