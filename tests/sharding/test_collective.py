"""What ranks tell each other, and how many of them have to."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import distributed
from fused_optim.sharding.collective import distinct, gather_at_first, on_all_ranks, on_any


def tell() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "any": [on_any(False), on_any(rank == 2), on_any(True)],
        "same": distinct(["a", "b"]),
        "different": distinct(["a"] * (1 + (rank == 1))),
        "first": gather_at_first(rank * 10),
    }


def test_three_ranks() -> None:
    for rank, found in enumerate(distributed.run(3, tell)):
        assert found["any"] == [False, True, True]
        assert found["same"] == [["a", "b"]] and found["different"] == [["a"], ["a", "a"], ["a"]]
        assert found["first"] == ([0, 10, 20] if rank == 0 else [])


def test_one_process() -> None:
    assert (on_any(True), on_any(False), distinct(5), gather_at_first(6)) == (True, False, [5], [6])


def gathers() -> tuple[int, str]:
    """How often objects are gathered: only where a rank has failed."""
    count = 0
    original = dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", counted)
        with on_all_ranks("nothing"):
            pass
        distinct("x")
        before = count
        try:
            with on_all_ranks("working"):
                if dist.get_rank() == 1:
                    raise KeyError("lost")
        except (KeyError, RuntimeError) as error:
            return before, f"{type(error).__name__} {error}"
    return before, ""


def test_objects_are_gathered_where_something_failed() -> None:
    elsewhere = (0, "RaisedElsewhere working: rank 1 failed: KeyError: 'lost'")
    assert distributed.run(3, gathers) == [elsewhere, (0, "KeyError 'lost'"), elsewhere]
