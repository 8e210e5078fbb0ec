"""What ranks tell each other, and how many of them have to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import distributed
from fused_optim.sharding.collective import (
    differences,
    distinct,
    gather_at_first,
    gather_on,
    meshes_of,
    on_all_ranks,
    on_any,
    scatter_from_first,
)


def tell() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "any": [on_any(False), on_any(rank == 2), on_any(True)],
        "same": distinct(["a", "b"]),
        "different": distinct(["a"] * (1 + (rank == 1))),
        "first": gather_at_first("x" * rank),
        "own": scatter_from_first(["", "a", "bbb"] if rank == 0 else []),
    }


def test_three_ranks() -> None:
    for rank, found in enumerate(distributed.run(3, tell)):
        assert found["any"] == [False, True, True]
        assert found["same"] == [["a", "b"]] and found["different"] == [["a"], ["a", "a"], ["a"]]
        assert found["first"] == (["", "x", "xx"] if rank == 0 else [])
        assert found["own"] == ["", "a", "bbb"][rank]


def test_one_process() -> None:
    assert (on_any(True), on_any(False), distinct(5), gather_at_first(6)) == (True, False, [5], [6])


def gathers() -> tuple[int, str]:
    """How often objects are gathered: only where a rank has failed."""
    count = 0
    original = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted)
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


def test_differences_name_values_and_ranks() -> None:
    given = {rank: {"same": "1", "other": str(rank // 4), "late": "x"} for rank in range(6)}
    del given[5]["late"]
    assert differences(given) == (
        "other: 0 on ranks 0, 1, 2, 3, 1 on ranks 4, 5; late: x on ranks 0, 1, 2, 3 and 1 more, nothing on rank 5"
    )
    assert differences({0: {"a": "1"}, 3: {"a": "1"}}) == ""


def of_a_mesh() -> tuple[dict[int, int], list[tuple[str, ...]]]:
    both = distributed.mesh(2, 2, names=("b", "a"))
    params = [distributed.shard(torch.ones(4), on, [Shard(0)]) for on in (both["b"], both["a"])]
    assert meshes_of(params) == meshes_of(params[::-1])
    return gather_on(both, dist.get_rank() ** 2), [mesh.mesh_dim_names or () for mesh in meshes_of(params)]


def test_values_of_a_mesh_and_the_order_of_meshes() -> None:
    assert distributed.run(4, of_a_mesh) == [({0: 0, 1: 1, 2: 4, 3: 9}, [("a",), ("b",)])] * 4
