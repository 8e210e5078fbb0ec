"""Checkpointer: what is saved while training goes on loads on any number of ranks; the newest stay, in any folder."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import cases
import distributed
from checkpoint_cases import FORMATS, Run
from distributed import Part, assert_same, join_all, part
from fused_optim import (
    export_optimizer_checkpoint,
    load_optimizer_checkpoint,
    save_master_safetensors,
    verify_checksums,
)
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint import verify as checksums
from fused_optim.checkpoint.publish import MANIFEST
from fused_optim.checkpoint.write import Saver
from native_cases import build, tensors_of, train, trained
from peers import FusedAdam
from quantized_cases import Run as QuantizedRun

SAVED = (2, 3, 4)
REM16 = cases.MASTER["bfloat16+rem16"]


def sorted_snapshot(run: Any) -> dict[str, Part]:
    return dict(sorted(run.snapshot().items()))


def open_checkpoints(run: Any, folder: str, **options: Any) -> Checkpointer:
    """On several ranks, in the thread that serves them: no signals."""
    return Checkpointer(run.model, run.optimizer, folder, sigterm=False, **options)


# --- other numbers of ranks -------------------------------------------------------------------------------------


def save_while_training(how: str, master: str, form: str, folder: str) -> list[dict[str, Part]]:
    run = Run(how, master)
    run.train(0, SAVED[0])
    snapshots = []
    with open_checkpoints(run, folder, format=form, extra={"schedule": run.schedule}, keep=2) as checkpointer:
        for step in SAVED:
            snapshots.append(sorted_snapshot(run))
            checkpointer.save(step)
            run.train(step, step + 1)
    return snapshots


def load_both(how: str, master: str, folder: str, formats: list[torch.dtype]) -> list[dict[str, Part]]:
    found = []
    for step in SAVED[1:]:
        run = Run(how, master, formats, fresh=True)
        checkpointer = open_checkpoints(run, folder, extra={"schedule": run.schedule})
        assert checkpointer.steps() == [*reversed(SAVED[1:])]
        if step == SAVED[-1]:
            assert checkpointer.load_latest() == step
        else:
            assert checkpointer.load(step) == step
        assert run.schedule.last_epoch == step
        found.append(sorted_snapshot(run))
    return found


def trained_only(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Frozen parameters have no states; those of Run that are loaded get none either."""
    return {name: value for name, value in found.items() if "frozen" not in name or "parameter" in name}


CASES = [
    ("fsdp", 2, "remainder16", "native"),
    ("fsdp", 2, "float16", "unscaled"),
    pytest.param("hsdp", 4, "remainder16", "unscaled", marks=pytest.mark.long),
    ("hsdp", 4, "remainder8", "native"),
    ("tp", 4, "bfloat16", "unscaled"),
]


@pytest.mark.parametrize("how, ranks, master, form", CASES)
def test_loads_on_other_numbers_of_ranks(how: str, ranks: int, master: str, form: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    saved = distributed.run(ranks, save_while_training, how, master, form, folder)
    expected = [join_all([result[i] for result in saved]) for i in range(1, len(SAVED))]
    assert sorted(path.name for path in Path(folder).iterdir()) == [f"step-{step:08d}" for step in SAVED[1:]]
    for number in (1, 3):
        results = distributed.run(number, load_both, "fsdp" if number > 1 else "plain", master, folder, FORMATS)
        for i, values in enumerate(expected):
            assert_same(trained_only(join_all([result[i] for result in results])), trained_only(values))


def load_other_formats(folder: str, reference: bool) -> dict[str, Part]:
    """The same from the checkpoint, and from the states themselves."""
    run = Run("plain", "remainder16", [torch.bfloat16] * len(FORMATS), fresh=True)
    if reference:
        other = Run("plain", "remainder16")
        other.train(0, SAVED[-1])
        run.model.load_state_dict(other.model.state_dict())
        run.optimizer.load_state_dict(other.optimizer.state_dict())
    else:
        assert open_checkpoints(run, folder).load_latest() == SAVED[-1]
    return {key: value for key, value in sorted_snapshot(run).items() if "group" not in key}


@pytest.mark.parametrize("form", ["native", "unscaled"])
def test_loads_into_other_formats(form: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    distributed.run(2, save_while_training, "fsdp", "remainder16", form, folder)
    loaded, expected = (distributed.run(1, load_other_formats, folder, reference) for reference in (False, True))
    assert_same(trained_only(join_all(loaded)), trained_only(join_all(expected)))


def quantized_round_trip(folder: str) -> None:
    for recipe in ("delayed", "mxfp8"):
        run = QuantizedRun(recipe)
        run.train(0, 2)
        expected = sorted_snapshot(run)
        with open_checkpoints(run, f"{folder}/{recipe}") as checkpointer:
            checkpointer.save(2)
            run.train(2, 3)
        run = QuantizedRun(recipe, fresh=True)
        assert open_checkpoints(run, f"{folder}/{recipe}").load_latest() == 2
        loaded = sorted_snapshot(run)
        assert all(torch.equal(loaded[name][2], value) for name, (_, _, value) in expected.items())


def test_quantized_weights(tmp_path: Path) -> None:
    distributed.run(2, quantized_round_trip, str(tmp_path))


# --- what is written ----------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 96, bias=False) for _ in range(12))


def save_replicas(folder: str) -> int:
    torch.manual_seed(0)
    model = Wide().bfloat16()
    fully_shard(model, mesh=distributed.mesh(2, 2, names=("replicate", "shard")))
    optimizer = FusedAdam(model.parameters(), state_dtype="int8", store_param_remainders=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        checkpointer.save(1)
    shards = [*model.parameters(), *(value for states in optimizer.state.values() for value in states.values())]
    return sum(shard._local_tensor.nbytes for shard in shards if isinstance(shard, DTensor))


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    """Every byte once, and each rank about as many."""
    held = distributed.run(4, save_replicas, str(tmp_path))
    path = tmp_path / "step-00000001"
    content = json.loads((path / "fused_optim_checksums.json").read_text())["files"]
    written = [
        sum(row[1] for file, rows in content.items() if file.startswith(f"__{rank}_") for row in rows)
        for rank in range(4)
    ]
    assert len(set(held)) == 1 and min(written) > 0.5 * max(written)
    tensors = sum(size for rows in content.values() for _, size, _ in rows if size > 4000)
    assert 2 * held[0] < tensors < 2.6 * held[0]  # of two shards, with torch's headers


def test_manifest_and_checksums(tmp_path: Path) -> None:
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, format="unscaled") as checkpointer:
        checkpointer.save(7)
    path = tmp_path / "step-00000007"
    verify_checksums(path)
    found = json.loads((path / MANIFEST).read_text())
    assert found["step"] == 7 and found["world_size"] == 1 and found["form"] == "unscaled"
    assert found["formats"] == {"exp_avg": ["int8"], "exp_avg_sq": ["int8"]}
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert found["files"] == {name: size for name, size in sizes.items() if name != MANIFEST}


def test_others_read_it(tmp_path: Path) -> None:
    """Torch's reader, and load_optimizer_checkpoint."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained(REM16, torch.int8, form="unscaled")
    with Checkpointer(model, optimizer, tmp_path, format="unscaled") as checkpointer:
        checkpointer.save(1)
    other, other_optimizer = build(REM16, torch.int8, fresh=True)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "step-00000001")
    load_optimizer_checkpoint(other, other_optimizer, tmp_path / "step-00000001")
    expected = optimizer.state_dict()["state"]
    assert_same(tensors_of(other_optimizer.state_dict()["state"]), tensors_of(expected))


def test_large_states_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_optim.checkpoint.write._FILE_BYTES", 1 << 12)
    monkeypatch.setattr("fused_optim.checkpoint.write.threads", lambda: 4)
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path) as checkpointer:
        checkpointer.save(1)
    files = sorted(tmp_path.rglob("*.distcp"))
    assert [file.name for file in files] == [f"__0_{i}.distcp" for i in range(4)]
    assert min(file.stat().st_size for file in files) > 0.3 * max(file.stat().st_size for file in files)


# --- which stay, and which is the newest --------------------------------------------------------------------------


def test_every_and_force(tmp_path: Path) -> None:
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, every=3, keep=None) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step)
        checkpointer.save(8, force=True)
        checkpointer.save(8, force=True)  # nothing to do
        checkpointer.wait()
        assert checkpointer.steps() == [8, 6, 3]


def test_the_newest_is_the_last_written(tmp_path: Path) -> None:
    """Also where training went back to an earlier step."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, keep=3) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step)
        checkpointer.load(10)
        train(model, optimizer, range(3))
        for step in (11, 20):
            checkpointer.save(step)
        checkpointer.wait()
        assert checkpointer.steps() == [20, 11, 30]
        model["conv"].data.zero_()
        assert checkpointer.load_latest() == 20 and optimizer.param_groups[0]["step"] == 5
        assert model["conv"].abs().sum() > 0


def test_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = build(REM16, torch.int8)
    checkpointer = Checkpointer(model, optimizer, tmp_path / "none")
    assert checkpointer.load_latest() is None and checkpointer.steps() == []
    with pytest.raises(FileNotFoundError, match="no whole checkpoint of step 3"):
        checkpointer.load(3)
    checkpointer.close()


def test_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = build(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path) as checkpointer:
        checkpointer.save(0)
    other, other_optimizer = build(REM16, torch.int8, fresh=True)
    with Checkpointer(other, other_optimizer, tmp_path) as checkpointer:
        assert checkpointer.load_latest() == 0
    assert all(torch.equal(other[name], model[name]) for name in model)


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before the event."""
    go = threading.Event()
    save = Saver.save

    def save_later(*args: Any, **options: Any) -> Any:
        assert go.wait(60)
        return save(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", save_later)
        yield go
        go.set()


def test_two_saves_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(REM16, torch.int8)
    expected = []
    with Checkpointer(model, optimizer, tmp_path) as checkpointer, held_back(monkeypatch) as go:
        for step in (2, 3):
            expected.append({name: param.detach().clone() for name, param in model.items()})
            checkpointer.save(step)
            train(model, optimizer, range(step, step + 1))
        assert checkpointer.steps() == []
        third = threading.Thread(target=checkpointer.save, args=(4,))
        third.start()  # waits for the first
        assert third.is_alive()
        go.set()
        third.join()
        checkpointer.wait()
        for step, values in zip((2, 3), expected, strict=True):
            checkpointer.load(step)
            assert all(torch.equal(model[name], value) for name, value in values.items())


# --- extras -----------------------------------------------------------------------------------------------------


class Loader:
    """Each rank is elsewhere in the data."""

    def __init__(self) -> None:
        self.position = {"index": 100 + (dist.get_rank() if dist.is_initialized() else 0), "seen": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "nested": [1, ("a", None)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"] == [1, ("a", None)]
        self.position = state["position"]


class Average:
    """Sharded."""

    def __init__(self, value: float) -> None:
        full = value * torch.arange(10.0)[:, None] * torch.ones(1, 4)
        self.tensor = distribute_tensor(full, distributed.mesh(), [Shard(0)], src_data_rank=None)
        self.count = int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": {"layer.0": self.tensor}, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor, self.count = state["weights"]["layer.0"], state["count"]


def save_extras(folder: str) -> None:
    run = Run("fsdp", "float32")
    extra = {"loader": Loader(), "average": Average(3.0), "schedule": run.schedule}
    run.train(0, 2)
    with open_checkpoints(run, folder, extra=extra) as checkpointer:
        checkpointer.save(2)
        extra["loader"].position["index"] = 0
        extra["average"].tensor.zero_()
        run.train(2, 3)


def load_extras(folder: str) -> tuple[int, Part, int, str]:
    run = Run("fsdp", "float32", fresh=True)
    extra = {"loader": Loader(), "average": Average(0.0), "schedule": run.schedule}
    extra["loader"].position["index"] = -1
    checkpointer = open_checkpoints(run, folder, extra=extra)
    refused = ""
    if dist.get_world_size() == 2:
        checkpointer.load(2)
    else:
        before = {name: param._local_tensor.clone() for name, param in run.model.named_parameters()}
        with pytest.raises(ValueError, match=r"'loader' was saved with different states on 2 ranks") as error:
            checkpointer.load(2)
        refused = str(error.value)
        assert all(torch.equal(param._local_tensor, before[name]) for name, param in run.model.named_parameters())
        checkpointer.load(2, without=["loader"])
    assert run.schedule.last_epoch == 2 and extra["average"].count == 3
    assert extra["average"].tensor._local_tensor.device.type == "cpu"
    return extra["loader"].position["index"], part(extra["average"].tensor), run.schedule.last_epoch, refused


def test_extras(tmp_path: Path) -> None:
    """Loaders are each rank's own; what is sharded is sharded anew; a schedule is everybody's."""
    distributed.run(2, save_extras, str(tmp_path))
    owners = json.loads((tmp_path / "step-00000002" / MANIFEST).read_text())["extra"]
    assert owners == {"loader": [0, 1], "average": [0, 0], "schedule": [0, 0]}
    expected = 3.0 * torch.arange(10.0)[:, None] * torch.ones(1, 4)
    for ranks in (2, 1, 3):
        results = distributed.run(ranks, load_extras, str(tmp_path))
        assert [index for index, *_ in results] == ([100, 101] if ranks == 2 else [-1] * ranks)
        assert torch.equal(distributed.join([average for _, average, *_ in results]), expected)
        assert all("without=['loader']" in refused for *_, refused in results) == (ranks != 2)


def test_extras_that_cannot_be(tmp_path: Path) -> None:
    model, optimizer = trained(REM16, torch.int8)
    with pytest.raises(TypeError, match=r"extra 'step': expected an object with state_dict\(\)"):
        Checkpointer(model, optimizer, tmp_path, extra={"step": 3})
    with pytest.raises(ValueError, match="name without dots"):
        Checkpointer(model, optimizer, tmp_path, extra={"a.b": Loader()})
    with Checkpointer(model, optimizer, tmp_path) as checkpointer:
        checkpointer.save(1)
    other = Checkpointer(model, optimizer, tmp_path, extra={"loader": Loader()}, sigterm=False)
    with pytest.raises(ValueError, match=r"no extra 'loader'.*without=\['loader'\]"):
        other.load_latest()
    assert other.load_latest(without=["loader"]) == 1


def test_model_and_optimizer_exchanged(tmp_path: Path) -> None:
    model, optimizer = build(REM16, torch.int8)
    other: Any = torch.optim.AdamW(model.parameters())
    for call in (Checkpointer, load_optimizer_checkpoint, export_optimizer_checkpoint, save_master_safetensors):
        for given in ((optimizer, model), (other, model), (str(tmp_path), model), (model, model)):
            with pytest.raises(
                (TypeError, RuntimeError), match="expected a model and its optimizer, in this order, got"
            ):
                call(*given, tmp_path)  # type: ignore[operator]
    assert not [*tmp_path.iterdir()]


# --- folders ---------------------------------------------------------------------------------


def memory_folder(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/run"


FOLDERS: dict[str, Callable[[Path], str]] = {
    "memory": memory_folder,
    "file": lambda tmp_path: f"file://{tmp_path}/run",
    "fsspec's local": lambda tmp_path: f"local-checkpoints://{tmp_path}/run",
}


def test_threads_share_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's memory file system gives everyone who reads a file the same stream, with one position."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, memory_folder(tmp_path)) as checkpointer:
        checkpointer.save(2)
        checkpointer.wait()
        path = checkpointer.path(2)
    interval = sys.getswitchinterval()
    monkeypatch.setattr(checksums, "threads_to_read", lambda: 8)
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            verify_checksums(path)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", FOLDERS)
def test_fsspec(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    class Remote(LocalFileSystem):
        """As object stores: it does not rename."""

        protocol = "local-checkpoints"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            """That of fsspec 2026.2 takes off "file" and "local" alone."""
            return super()._strip_protocol(path.removeprefix("local-checkpoints://"))

        def mv(self, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

    fsspec.register_implementation("local-checkpoints", Remote, clobber=True)
    folder = FOLDERS[kind](tmp_path)
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, folder, keep=2, extra={"loader": Loader()}) as checkpointer:
        for step in (2, 3, 4):
            checkpointer.save(step)
            train(model, optimizer, range(step, step + 1))
        checkpointer.wait()
        assert checkpointer.steps() == [4, 3]
    other, other_optimizer = build(REM16, torch.int8, fresh=True)
    with Checkpointer(other, other_optimizer, folder, extra={"loader": Loader()}) as checkpointer:
        assert checkpointer.load_latest() == 4
        load_optimizer_checkpoint(other, other_optimizer, checkpointer.path(4), verify=True)
        train(other, other_optimizer, range(4, 5))
    assert_same(
        {name: param.detach() for name, param in other.items()}, {name: param.detach() for name, param in model.items()}
    )
    if kind == "memory":
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    else:
        shutil.rmtree(tmp_path / "run")


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, progress=True) as checkpointer:
        checkpointer.save(5)
    assert "step 5: saved 0.00 GB in " in capsys.readouterr().err
