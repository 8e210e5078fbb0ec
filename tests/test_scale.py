"""``benchmarks/scale.py`` at small sizes, and the plans of saves that it counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

import scale
from fused_optim.checkpoint.write import Planner
from scale import Model
from simulation import simulated

RANKS = 4
SMALL: dict[str, Model] = {
    "dense": scale.llama(1, 256, 512, 2, keys=1, vocabulary=1001),
    "experts": scale.experts(2, 256, 256, 5, dense=1, heads=2)[1:-1],
}
WIDE = scale.llama(1, 4096, 512, 32, keys=1, vocabulary=1001)  # norms that are cut into blocks
FILES = ("llama-8b", "llama-70b", "llama-405b", "llama-405b-1024", "experts-671b", "experts-671b-more")
LAYOUTS = {layout.kind: layout for layout in scale.layouts(RANKS)}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", SMALL)
def test_every_kind_of_rank(name: str, kind: str) -> None:
    """Of the first, the middle, the last, an uneven and an empty one: indices, blocks and what is stored."""
    model, layout = SMALL[name], LAYOUTS[kind]
    kinds = scale.kinds_of_ranks(model, layout)
    if kind == "fsdp":
        assert kinds.keys() >= ({"uneven"} if name == "dense" else {"uneven", "empty"})
    for rank in sorted(set(kinds.values())):
        found = scale.stepped(model, layout, rank, 1 << 30)
        assert found["weights"] == len(model)
        assert (found["shards_with_elements"] < len(model)) == any(
            start == end for weight in model for start, end in layout.ranges(weight, rank)
        )
    compared, left_out = scale.check_states(model, layout, sorted(set(kinds.values())))
    assert compared >= 3 * len(model) and not left_out


# --- plans of saves -----------------------------------------------------------------------------------------------


def plans(kind: str, ours: bool, model: Model) -> list[SavePlan]:
    """Of all ranks."""
    found = []
    for rank in range(RANKS):
        with simulated(RANKS, rank):
            state = scale.state_of(model, LAYOUTS[kind])
            planner: Any = Planner(True) if ours else DefaultSavePlanner()
            found.append(scale.local_plan(planner, state, rank)[0])
    return found


def merged(found: list[SavePlan]) -> tuple[Counter[Any], Any]:
    """How many shards have elements, by entry and size; and the description of the entries, as torch merges plans."""
    planner = DefaultSavePlanner()
    _, metadata = planner.create_global_plan(found)
    chunks = Counter(
        (key, tuple(chunk.offsets), tuple(chunk.sizes))
        for key, entry in metadata.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", [])
        if chunk.sizes.numel()
    )
    return chunks, (metadata.state_dict_metadata.keys(), metadata.planner_data)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_plans_hold_every_shard_once(kind: str) -> None:
    """And make the same checkpoint as torch's, which also have what the coordinator drops."""
    model = [*SMALL["dense"], *SMALL["experts"][-3:]]
    ours, torchs = plans(kind, True, model), plans(kind, False, model)
    (chunks, rest), (expected, expected_rest) = merged(ours), merged(torchs)
    assert chunks == expected and set(chunks.values()) == {1} and rest == expected_rest
    shards = Counter(item.index for plan in ours for item in plan.items)
    assert set(shards.values()) == {1}
    assert not [item for plan in ours[1:] for item in plan.items if item.type == WriteItemType.BYTE_IO]
    assert not any(plan.planner_data for plan in ours[1:])


def test_replicas_share_out_the_bytes() -> None:
    written = [
        sum(item.tensor_storage_size() or 0 for item in plan.items) for plan in plans("hsdp", True, SMALL["dense"])
    ]
    assert max(written) < 1.2 * min(written)


def test_keys_of_some_ranks_are_kept() -> None:
    """Where ranks have different keys, each sends its own numbers and paths."""
    with simulated(RANKS, 2):
        state = {"model": {"own": 5}, "optimizer": {}}
        plan, _ = scale.local_plan(Planner(), state, 2)
    assert [item.index.fqn for item in plan.items] == ["model.own"] and plan.planner_data == {
        "model.own": ("model", "own")
    }


@pytest.mark.parametrize("alike, prefix", [(False, "model"), (True, "extra")])
def test_replicas_that_may_have_other_keys_plan_all(alike: bool, prefix: str) -> None:
    """A rule that some of them do not know would leave shards out; torch drops what is there twice."""
    found = []
    for rank in range(RANKS):
        with simulated(RANKS, rank):
            shards = scale.state_of(SMALL["dense"], LAYOUTS["hsdp"])["model"]
            only_here = {"own": shards.pop(next(iter(shards)))} if rank < 2 else {}
            state = {prefix: shards | only_here}
            plan, _ = scale.local_plan(Planner(alike), state, rank)
            found.append({item.index.fqn for item in plan.items if item.tensor_data})
            assert found[-1] == {f"{prefix}.{key}" for key in state[prefix]}
    assert found[0] - found[-1] == {f"{prefix}.own"}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_sizes_are_reported(kind: str) -> None:
    found = scale.planned(WIDE, WIDE, LAYOUTS[kind], RANKS, True)
    assert found["sampled_ranks"] == RANKS
    assert 0 < found["gathered_bytes"] < found["gathered_bytes_with_torch_planner"]
    every = plans(kind, True, WIDE)
    assert found["items"] == sum(len(plan.items) for plan in every)
    nbytes, parts, _ = scale.metadata_bytes(every)
    assert parts == found["items"] and found["metadata_bytes"] == pytest.approx(nbytes, rel=0.1)


def test_the_table_of_the_page() -> None:
    root = Path(scale.__file__).parents[1]
    files = (root / "benchmarks/results/2026-11-22-scale" / f"{name}.json" for name in FILES)
    runs = [run for file in files for run in json.loads(file.read_text())["runs"]]
    assert scale.table(runs) in (root / "docs/scale.md").read_text()
