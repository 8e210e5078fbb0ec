"""``benchmarks/pretraining.py``: the text and its split, runs that are stopped and go on, queue, report, errors."""

from __future__ import annotations

import argparse
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
from pretraining import STOPPED, Windows, parse_args, report_table, summary_of, thinned
from pretraining_runs import GPT, RUNS, Trainee, type_of

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


def args_of(texts: Path, *more: str) -> argparse.Namespace:
    return parse_args(["train", "fp32", *arguments(texts, *more)])


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


def test_the_model_has_the_size_of_gpt2_small() -> None:
    with torch.device("meta"):
        model = GPT(12, 768, 25_344)
    assert round(sum(param.numel() for param in model.parameters()) / 1e6) == 124
    kinds = {type_of(name) for name, param in model.named_parameters() if param.dim() > 1}
    assert kinds == {"embedding", "attention qkv", "attention out", "MLP", "head"}


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


def test_no_run_begins_that_would_end_too_late(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_args(["train", "fp32", "muon-bf16", *arguments(texts), "--seconds", "0.001"])
    assert pretraining.train(args) == 0
    assert "muon-bf16: no time is left" in capsys.readouterr().out
    assert result(texts, "fp32")["steps"] == 6 and not (texts.parent / "runs" / "muon-bf16.json").exists()


def test_a_run_of_other_options_does_not_go_on(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        assert pretraining.train(args_of(texts)) == STOPPED
    with pytest.raises(SystemExit, match="is of other options"):
        pretraining.train(args_of(texts, "--learning-rate", "0.5"))


@pytest.mark.long
@pytest.mark.usefixtures("forked_python")
def test_a_queue_starts_processes_and_reports(texts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = parse_args(["queue", "--gpus", "0", *arguments(texts), "--runs", "fp32"])
    assert pretraining.run_queue(args) == 0
    output = capfd.readouterr().out
    assert "fp32: done" in output and "not begun: none" in output
    assert f"{result(texts, 'fp32')['held_out_loss']:.4f}" in output


@pytest.mark.parametrize("name", sorted(PEERS))
def test_peers_say_why_they_cannot_run(name: str, texts: Path) -> None:
    with pytest.raises(SystemExit, match=f"{name}: (needs|runs on GPUs only)"):
        pretraining.train(parse_args(["train", name, *arguments(texts)]))


class Clock:
    """Of a queue whose runs take 100 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pretraining.time, "monotonic", lambda: self.now)

    def execute(self, name: str, gpu: int) -> str:
        self.now += 100
        return "done"


@pytest.mark.parametrize(
    "seconds, more, begun", [(350, [], 3), (350, ["--begin-all"], 4), (120, [], 1), (90, ["--estimate", "95"], 0)]
)
def test_runs_that_do_not_fit_are_not_begun(
    seconds: int, more: list[str], begun: int, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    args = parse_args(["queue", "--seconds", str(seconds), *more, "--runs", *list(RUNS)[:6]])
    line = pretraining.Queue(args)
    monkeypatch.setattr(line, "execute", clock.execute)
    line.work(0)
    assert list(line.outcomes) == list(RUNS)[:begun] and line.pending == list(RUNS)[begun:6]


def test_curves_are_means() -> None:
    assert thinned([1.0, 3.0, 5.0, 7.0], 2) == [(2, 2.0), (4, 6.0)]
    assert thinned([1.0, 3.0], 200) == [(1, 1.0), (2, 3.0)]


PAGE = """
<!-- pretraining: runs -->

old

<!-- end -->

between

<!-- pretraining: errors -->

old

<!-- end -->
"""


@pytest.fixture
def runs(texts: Path) -> Path:
    """A folder of results."""
    args = parse_args(["train", "fp32", "int8", "bf16", *arguments(texts)])
    assert pretraining.train(args) == pretraining.errors(args) == 0
    return args.output


def test_a_summary_compares_runs_of_one_text(runs: Path, texts: Path) -> None:
    summary = summary_of([runs])
    assert [row["name"] for row in summary["runs"]] == ["fp32", "int8", "bf16"]
    assert len(report_table(summary).splitlines()) == 4
    losses = [result(texts, name)["held_out_loss"] for name in ("fp32", "int8")]
    (key,) = (key for key in summary["runs"][1] if key.startswith("percent"))
    assert key == ("percent_above_fp32" if losses[1] > losses[0] else "percent_below_fp32")
    assert summary["runs"][1][key] == pytest.approx(100 * abs(losses[1] - losses[0]) / losses[0])
    of_fp32 = [row["error"] for row in summary["errors"] if row["format"] == "FP32"]
    of_int8 = [row["error"] for row in summary["errors"] if row["format"] == "int8" and row["type"] == "MLP"]
    assert len(of_fp32) == 18 and max(of_fp32) < 1e-5 and len(of_int8) == 3 and 1e-3 < min(of_int8) < 0.2
    file = runs / "int8.json"
    before = file.read_text()
    for change, message in ({"steps": 7}, "differ in steps"), ({"text": {"fingerprint": "x"}}, "different texts"):
        file.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(SystemExit, match=message):
            summary_of([runs])


def test_runs_are_compared_with_the_same_seeds(tmp_path: Path, texts: Path, runs: Path) -> None:
    """Muon with torch's, FP8 products with BF16's."""
    losses = {"int8": 8.0, "products-rows": 8.4, "muon-torch": 4.0, "muon-int8": 4.04}
    losses |= {"int8-seed1": 9.0, "products-rows-seed1": 8.1, "muon-torch-seed1": 2.0, "muon-int8-seed1": 2.2}
    for name, loss in losses.items():
        facts = result(texts, "int8") | {"name": name, "held_out_loss": loss, "seed": int(name.endswith("seed1"))}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    percents = {
        row["name"]: {key: value for key, value in row.items() if key.startswith("percent")}
        for row in summary_of([tmp_path])["runs"]
    }
    assert percents == {
        **{name: {} for name in ("int8", "int8-seed1", "muon-torch", "muon-torch-seed1")},
        "products-rows": {"percent_above_bf16_products": pytest.approx(5.0)},
        "products-rows-seed1": {"percent_below_bf16_products": pytest.approx(10.0)},
        "muon-int8": {"percent_above_torch_muon": pytest.approx(1.0)},
        "muon-int8-seed1": {"percent_above_torch_muon": pytest.approx(10.0)},
    }


def test_a_stopped_run_is_compared_after_as_many_steps(
    runs: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, steps in {"fp8": 2, "no-master-int8": 4}.items():  # evaluated after 3 and 6 steps
        with monkeypatch.context() as patch:
            stop_after(steps, patch)
            assert pretraining.train(parse_args(["train", name, *arguments(texts)])) == STOPPED
    summary = summary_of([runs])
    assert len(summary["runs"]) == 3
    (row,) = summary["stopped"]
    ((steps, loss),) = result(texts, "no-master-int8.partial")["held_out"]
    exact = dict(result(texts, "fp32")["held_out"])[3]
    assert (steps, row["name"], row["steps"], row["evaluated_steps"]) == (3, "no-master-int8", 4, 3)
    assert (row["evaluated_loss"], row["evaluated_loss_fp32"]) == (loss, exact)
    gap = row.get("percent_above_fp32", 0.0) - row.get("percent_below_fp32", 0.0)
    assert gap == pytest.approx(100 * (loss - exact) / exact) and gap != 0
    assert f"{loss:.4f}  {gap:+.3f}%" in report_table(summary).splitlines()[-1]
    file = runs / "no-master-int8.partial.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text": {"fingerprint": "x"}}))
    with pytest.raises(SystemExit, match="different texts"):
        summary_of([runs])


def test_the_page_is_brought_up_to_date(runs: Path, texts: Path) -> None:
    """What the comments say of the figures, tests/test_figures.py checks on the page itself."""
    pytest.importorskip("matplotlib")
    from pretraining_page import update

    page = runs.parent / "page.md"
    page.write_text(PAGE)
    update(runs, page)
    text, int8 = page.read_text(), result(texts, "int8")
    gap = int8["held_out_loss"] / result(texts, "fp32")["held_out_loss"] - 1
    compared = f"{int8['held_out_loss']:.4f} | {100 * abs(gap):.2f}% {'above' if gap > 0 else 'below'}"
    assert f"| FusedAdamW FP32 master, int8 states | 0.00 | {compared} | {int8['tokens_per_s']:,.0f} |" in text
    assert "\nold\n" not in text and "\nbetween\n" in text and text.count("<!-- figures: summary.json") == 2
    assert text.count("\n| int8, ") == text.count("\n| BF16, ") == 3
    assert b"FusedAdamW FP32 master, int8 states" in (runs / "curves.svg").read_bytes()
    with pytest.raises(SystemExit, match="0 places for the table of runs"):
        page.write_text("nothing")
        update(runs, page)
