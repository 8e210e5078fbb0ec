"""What is loaded goes from the host to GPUs through page-locked memory: the same values, and no part is overwritten
before it has arrived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fused_optim.memory import uploads

PIECE = 64


class Queue:
    """A stream of a GPU that is the CPU: copies are done when somebody waits for what comes after them."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Tensor, Tensor]] = []

    def record_event(self) -> Queue:
        return self

    def synchronize(self) -> None:
        for target, source in self.jobs:
            target.numpy()[...] = source.numpy()
        self.jobs.clear()


class Later(torch.overrides.TorchFunctionMode):
    """Copies that do not block are queued."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            self.queue.jobs.append(args)
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    queue = Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads, "_PIECE", PIECE)
        patch.setattr(uploads, "_LARGE", 8)
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
        patch.setattr("fused_optim.memory.host_memory._lock", lambda tensor: None)
        patch.setattr("fused_optim.memory.host_memory._unlock", lambda address: None)
        patch.setattr(torch.cuda, "current_stream", lambda device: queue)
        with Later(queue):
            yield queue


@given(sizes=st.lists(st.integers(0, 5 * PIECE), max_size=6), dtype=st.sampled_from([torch.int8, torch.float32]))
def test_all_pieces_arrive(queue: Queue, sizes: list[int], dtype: torch.dtype) -> None:
    sources = [torch.arange(size).to(dtype) for size in sizes]
    wanted, targets = [source.clone() for source in sources], [torch.full_like(source, 9) for source in sources]
    with uploads.uploading():
        for target, source in zip(targets, sources, strict=True):
            uploads.copy_into(target, source)
            source.zero_()  # it may be used for something else at once
    assert all(torch.equal(target, own) for target, own in zip(targets, wanted, strict=True)) and not queue.jobs


def test_large_tensors_are_queued(queue: Queue) -> None:
    target, source = torch.zeros(2, PIECE), torch.ones(2, PIECE)
    with uploads.uploading():
        uploads.copy_into(target, source)
        assert len(queue.jobs) == 1 and not target.all()  # one of two buffers is on its way
        queue.synchronize()
    uploads.copy_into(target, source)  # nobody has buffers any more
    assert not queue.jobs


def test_what_fails_leaves_nothing_on_its_way(queue: Queue) -> None:
    target = torch.zeros(PIECE)
    with pytest.raises(KeyError, match="mine"), uploads.uploading():
        uploads.copy_into(target, torch.ones(PIECE))
        raise KeyError("mine")
    assert target.all() and not queue.jobs


def other_shape(target: Tensor) -> tuple[Tensor, Tensor]:
    return target, torch.ones(8)


def other_dtype(target: Tensor) -> tuple[Tensor, Tensor]:
    return target, torch.ones(4, 8, dtype=torch.int32)


def transposed(target: Tensor) -> tuple[Tensor, Tensor]:
    return target, torch.ones(8, 4).t()


def negated(target: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous, of bytes that are not its values."""
    return target, torch._neg_view(torch.ones(4, 8))


def into_a_part(target: Tensor) -> tuple[Tensor, Tensor]:
    return target[:, :4], torch.ones(4, 4)


@pytest.mark.parametrize("case", [other_shape, other_dtype, transposed, negated, into_a_part])
def test_other_copies_are_torchs(queue: Queue, case) -> None:  # type: ignore[no-untyped-def]
    target, source = case(torch.zeros(4, 8))
    with uploads.uploading():
        uploads.copy_into(target, source)
        assert target.all() and not queue.jobs
    assert torch.equal(target, source.to(target.dtype).expand_as(target))


def test_without_page_locked_memory(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor) -> None:
        raise RuntimeError("cannot be page-locked")

    monkeypatch.setattr("fused_optim.memory.host_memory._lock", refuse)
    target = torch.zeros(PIECE)
    with uploads.uploading():
        uploads.copy_into(target, torch.ones(PIECE))
        assert target.all() and not queue.jobs
