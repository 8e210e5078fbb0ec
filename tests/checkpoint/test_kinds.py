"""Kinds of optimizers in a Checkpointer: this package's, checkpoints of another kind, and others, which are refused."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import distributed
from checkpoint_cases import values
from distributed import Part, assert_same, join_all, part, same_bits, shard_like
from fused_optim import FusedAdamW, FusedLion
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint import publish as manifest
from fused_optim.checkpoint import verify as checksums
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.publish import Manifest
from fused_optim.sharding.collective import RaisedElsewhere
from fused_optim.sharding.dtensor import local_tensor
from pairwise import each_once

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVED_AT, END = 2, 4
SHAPES = {"frozen": (4, 2), "head": (3, 64), "matrix": (6, 128), "vector": (5,)}  # in the order of ParameterDict
KINDS: dict[str, Callable[..., Any]] = {
    "lion": lambda params, lr: FusedLion(params, lr=lr, state_dtype="int8"),
    "adam": lambda params, lr: FusedAdamW(params, lr=lr, state_dtype="int8"),
    "torch.optim.AdamW": AdamW,
    "torch.optim.SGD": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
}
OURS = ("adam", "lion")


def build(kind: str, seed: int = 0, groups: int = 2) -> tuple[nn.Module, Any]:
    """``seed``: other values and learning rates. In BF16 for this package's, which have masters then."""
    dtype = torch.bfloat16 if kind in OURS else torch.float32
    weights = {name: values(shape, seed, i).to(dtype) for i, (name, shape) in enumerate(SHAPES.items())}
    model = nn.ParameterDict({n: nn.Parameter(w, requires_grad=n != "frozen") for n, w in weights.items()})
    fully_shard(model, mesh=distributed.mesh())
    params = list(model.parameters())
    cut = params if groups == 1 else params[:2]
    listed = [{"params": cut, "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}][:groups]
    return model, KINDS[kind](listed, lr=0.01 if seed == 0 else 0.5)


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for i, param in enumerate(model.parameters()):
            if param.requires_grad:
                param.grad = shard_like(values(param.shape, 9, i, step).to(param.dtype), param)
        optimizer.step()
        optimizer.zero_grad()


def users_entries(model: nn.Module, optimizer: Optimizer) -> None:
    """Of the frozen parameter, too."""
    for param in model.parameters():
        mine = {"average": param.detach() + 1, "notes": {"seen": 7}, "count": torch.tensor(5.0)}
        optimizer.state[param].update(mine)
    optimizer.param_groups[0].update(scale=0.25, mine={"list": [1, 2], "text": "x"})


def leaves(value: Any, path: str) -> dict[str, Part]:
    if isinstance(value, dict):
        return {k: v for key, item in sorted(value.items()) for k, v in leaves(item, f"{path} {key}").items()}
    is_tensor = isinstance(value, Tensor)
    return {path: part(value if is_tensor else torch.tensor(zlib.crc32(repr(value).encode())))}


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Part]:
    """All of it, by names."""
    names = {param: name for name, param in model.named_parameters()}
    found = {name: part(param) for name, param in model.named_parameters()}
    state = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i in sorted(state["state"]):
        found |= leaves(state["state"][i], f"{names[params[i]]}:")
    for i, group in enumerate(state["param_groups"]):
        found |= leaves({k: v for k, v in group.items() if k != "params" and "dtype" not in k}, f"group {i}:")
    return found


# --- nothing is changed ---------------------------------------------------------------------------


class Watched:
    """Everything of a model and its optimizer, with hooks that count."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self.calls = model, optimizer, 0
        self.scheduler = ExponentialLR(optimizer, 0.5)
        optimizer.register_step_pre_hook(self._count)
        optimizer.register_step_post_hook(self._count)
        self._handle = register_optimizer_step_pre_hook(self._count)
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        self.groups, self.objects = optimizer.param_groups, dict(vars(optimizer))
        self.before = self._now()

    def _count(self, *args: Any) -> None:
        self.calls += 1

    def _now(self) -> dict[str, Any]:
        params = list(self.model.parameters())
        return copy.deepcopy(
            {
                "model": {name: local_tensor(value) for name, value in self.model.state_dict().items()},
                "versions": [param._version for param in params],
                "states": [_local(dict(self.optimizer.state.get(param, {}))) for param in params],
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
                "grads": [None if param.grad is None else local_tensor(param.grad) for param in params],
                "defaults": self.optimizer.defaults,
                "generator": torch.get_rng_state(),
                "calls": self.calls,
            }
        )

    def check(self) -> None:
        """As it was, and of the same objects."""
        assert identical(self._now(), self.before), (self._now(), self.before)
        assert self.optimizer.param_groups is self.groups
        assert vars(self.optimizer).keys() == self.objects.keys()
        own = vars(self.optimizer)
        assert all(own[name] is value or own[name] == value for name, value in self.objects.items())

    def close(self) -> None:
        self._handle.remove()


def _local(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return local_tensor(value) if isinstance(value, Tensor) else value


def identical(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a.detach(), b.detach())
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    return bool(a == b)


def left_alone(kind: str, folder: str, used: bool, wanted: str | None, groups: int = 2) -> None:
    """A load that fails as ``wanted``, or a dry run, changes nothing. ``used``: with states, before it."""
    model, optimizer = build(kind, seed=1, groups=groups)
    if used:
        train(model, optimizer, 0, 1)
    watched = Watched(model, optimizer)
    with Checkpointer(model, optimizer, folder, sigterm=False, readonly=True) as checkpointer:
        if wanted is None:
            assert checkpointer.load(SAVED_AT, dry_run=True) == SAVED_AT
        else:
            with pytest.raises((ValueError, RaisedElsewhere), match=wanted) as error:
                checkpointer.load(SAVED_AT)
            assert "\n" not in str(error.value)
    watched.close()
    watched.check()


def save(kind: str, folder: str, form: Any = "native", entries: bool = False) -> None:
    model, optimizer = build(kind)
    train(model, optimizer, 0, SAVED_AT)
    if entries:
        users_entries(model, optimizer)
    with Checkpointer(model, optimizer, folder, sigterm=False, format=form) as checkpointer:
        checkpointer.save(SAVED_AT)


# --- resumed runs ---------------------------------------------------------------------------------


def straight(kind: str, entries: bool) -> dict[str, Part]:
    model, optimizer = build(kind)
    train(model, optimizer, 0, SAVED_AT)
    if entries:
        users_entries(model, optimizer)
    train(model, optimizer, SAVED_AT, END)
    return snapshot(model, optimizer)


def resumed(kind: str, folder: str, used: bool) -> tuple[dict[str, Part], Any]:
    left_alone(kind, folder, used, None)
    model, optimizer = build(kind, seed=1)
    if used:
        train(model, optimizer, 0, 3)
    watched = Watched(model, optimizer)
    with Checkpointer(model, optimizer, folder, sigterm=False, readonly=True) as checkpointer:
        assert checkpointer.load(SAVED_AT) == SAVED_AT
        report = checkpointer.report
    watched.close()
    assert watched.calls == 0
    optimizer.zero_grad()
    train(model, optimizer, SAVED_AT, END)
    return snapshot(model, optimizer), report


RANKS = [(1, 3), (2, 1), (3, 2)]


def check_resumed(kind: str, form: str, ranks: tuple[int, int], used: bool, entries: bool, path: Path) -> list[Any]:
    distributed.run(ranks[0], save, kind, str(path), form, entries)
    results = distributed.run(ranks[1], resumed, kind, str(path), used)
    expected = join_all(distributed.run(1, straight, kind, entries))
    found = join_all([result[0] for result in results])
    found = {name: value for name, value in found.items() if "initial_lr" not in name}  # the scheduler's, of the test
    assert_same(found, expected)
    return results


@pytest.mark.parametrize(
    "kind, form, ranks", each_once(product(["lion", "adam"], ["native", "unscaled"], RANKS)), ids=str
)
def test_resumed_runs(kind: str, form: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    results = check_resumed(kind, form, ranks, ranks[0] == 2, ranks[0] == 3, tmp_path)
    found = json.loads((tmp_path / f"step-{SAVED_AT:08d}" / manifest.MANIFEST).read_text())
    assert (found["form"], found.get("optimizer", "adam")) == (form, kind)
    assert set(found["formats"]) == ({"exp_avg"} if kind == "lion" else {"exp_avg", "exp_avg_sq"})
    for _, report in results:
        assert (report.optimizer.source, report.optimizer.parameters) == ("fused_optim", 3)
        assert report.optimizer.steps == (SAVED_AT, SAVED_AT)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch.optim.AdamW", "torch.optim.SGD"])
def test_others_are_refused(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = KINDS[kind](model.parameters(), lr=0.1)
    match = "expected FusedAdamW, FusedLion or FusedMuon, got .*; torch's optimizers are saved by torch.distributed.ch"
    with pytest.raises(TypeError, match=match):
        Checkpointer(model, optimizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_state_dict_of_a_subclass_is_refused(tmp_path: Path) -> None:
    """Saves ask for a form of their own, not by this method."""

    class Noting(FusedAdamW):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "note": 1}

    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"Noting has a state_dict\(\) of its own.*register_state_dict_post_hook"):
        Checkpointer(model, Noting(model.parameters()), tmp_path)


def save_by_torch(kind: str, folder: str, named: bool = False) -> None:
    """``named``: with a manifest, as earlier versions have saved torch's optimizers."""
    model, optimizer = build(kind)
    train(model, optimizer, 0, SAVED_AT)
    content = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    place = folder_at(f"{folder}/step-{SAVED_AT:08d}")
    dcp.save(content, checkpoint_id=str(place))
    if named:
        checksums.write_checksums(str(place))
        if torch.distributed.get_rank() == 0:
            sums, ranks = manifest.crc_of_checksums(place), torch.distributed.get_world_size()
            manifest.write_manifest(place, Manifest(SAVED_AT, 1, ranks, None, {}, place.sizes(), sums, optimizer=kind))
        torch.distributed.barrier()


REFUSED = [
    ("torch.optim.AdamW", "lion", r"parameter 1 \('head', .* was saved with exp_avg_sq: another optimizer's"),
    ("lion", "adam", r"of another optimizer: expected the update rule adam, found lion"),
    ("adam", "lion", r"of another optimizer: expected the update rule lion, found adam"),
]


@pytest.mark.parametrize("saved, loaded, match", REFUSED)
def test_what_does_not_fit_is_refused(saved: str, loaded: str, match: str, tmp_path: Path) -> None:
    """On every rank, in one line, before anything was changed; there is no manifest that names the optimizer."""
    ranks = 1 + [each[0] for each in REFUSED].index(saved)
    distributed.run(ranks, save_by_torch, saved, str(tmp_path))
    for used in (False, True):
        distributed.run(ranks, left_alone, loaded, str(tmp_path), used, match)


def test_other_param_groups_are_refused(tmp_path: Path) -> None:
    distributed.run(2, save_by_torch, "lion", str(tmp_path))
    match = r"different values of weight_decay for parameter 0 \('frozen'"
    distributed.run(2, left_alone, "lion", str(tmp_path), False, match, 1)
    distributed.run(2, left_alone, "lion", str(tmp_path), False, None)


# --- kinds ----------------------------------------------------------------------------------------


def into_all_kinds(saved: str, folder: str) -> None:
    if saved in OURS:
        save(saved, folder)
    else:
        save_by_torch(saved, folder, named=True)
    for loaded in OURS:
        match = None
        if loaded != saved and (saved, loaded) != ("torch.optim.AdamW", "adam"):
            match = rf"another optimizer: expected {loaded}, found {saved}; model_only=True loads the model alone"
        for used in (False, True):
            left_alone(loaded, folder, used, match)
        model, optimizer = build(loaded, seed=1)
        before = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        Checkpointer(model, optimizer, folder, sigterm=False, readonly=True).load(SAVED_AT, model_only=True)
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == before
        other, its = build(saved)
        train(other, its, 0, SAVED_AT)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_tensor(ours), local_tensor(theirs).to(ours.dtype))


@pytest.mark.parametrize("saved, ranks", list(zip(KINDS, (2, 1, 3, 2), strict=True)))
def test_each_kind_into_each(saved: str, ranks: int, tmp_path: Path) -> None:
    """By name on every rank; a FusedAdam takes AdamW's; the model alone is loaded from any."""
    distributed.run(ranks, into_all_kinds, saved, str(tmp_path))


def without_kind(saved: str, folder: str) -> None:
    """As earlier releases have saved: only a FusedAdam had a form."""
    save(saved, folder)
    if torch.distributed.get_rank() == 0:
        place = folder_at(f"{folder}/step-{SAVED_AT:08d}")
        found = manifest.read_manifest(place)
        assert found.optimizer == (None if saved == "adam" else saved)
        manifest.write_manifest(place, replace(found, optimizer=None, form=found.form if saved == "adam" else None))
        assert "optimizer" not in json.loads(place.read(manifest.MANIFEST))
    torch.distributed.barrier()
    left_alone(saved, folder, False, None)
    if saved == "adam":
        left_alone("lion", folder, False, "another optimizer: expected lion, found adam")


@pytest.mark.parametrize("saved", OURS)
def test_older_checkpoints_do_not_name_it(saved: str, tmp_path: Path) -> None:
    distributed.run(2, without_kind, saved, str(tmp_path))
    results = distributed.run(1, resumed, saved, str(tmp_path), False)
    found = {name: value for name, value in join_all([results[0][0]]).items() if "initial_lr" not in name}
    assert_same(found, join_all(distributed.run(1, straight, saved, False)))


def test_what_is_no_name_is_damage(tmp_path: Path) -> None:
    distributed.run(1, save, "adam", str(tmp_path))
    place = folder_at(tmp_path / f"step-{SAVED_AT:08d}")
    manifest.write_manifest(place, replace(manifest.read_manifest(place), optimizer=["x"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is damaged: expected the name of an optimizer"):
        manifest.read_manifest(place)


@pytest.mark.parametrize("kinds", [("lion", "adam"), ("adam", "lion")], ids=str)
def test_state_dicts_of_another_rule_are_refused(kinds: tuple[str, str], tmp_path: Path) -> None:
    saved, loaded = (distributed.run(1, rule_of, kind, str(tmp_path / kind))[0] for kind in kinds)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    optimizer = KINDS[kinds[1]]([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    for state in (saved, {**saved, "state": {}}):
        with pytest.raises(ValueError, match=f"the state dict is of .*: expected the update rule {kinds[1]}, found"):
            optimizer.load_state_dict(state)
        assert identical(optimizer.state_dict(), before)
    optimizer.load_state_dict(loaded)


def rule_of(kind: str, folder: str) -> dict[str, Any]:
    model, optimizer = build(kind)
    train(model, optimizer, 0, 1)
    return _local(optimizer.state_dict()) | {"param_groups": optimizer.state_dict()["param_groups"]}


# --- pipelines ------------------------------------------------------------------------------------


def stages(kind: str, folder: str) -> None:
    """Of a pipeline: ranks own different parameters, and every one has its settings in the checkpoint."""
    rank = torch.distributed.get_rank()

    def stage(kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
        model = nn.ParameterDict({f"layer{rank}": nn.Parameter(values((4, 8), seed, rank))})
        return model, KINDS[kind](model.parameters(), lr=0.01 * (1 + rank + seed))

    model, optimizer = stage(kind, 0)
    train(model, optimizer, 0, SAVED_AT)
    users_entries(model, optimizer)
    del optimizer.state[model[f"layer{rank}"]]["notes"]  # flattened, torch does not say what is nested
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        checkpointer.save(SAVED_AT)
    train(model, optimizer, SAVED_AT, END)
    other, loaded = stage(kind, 1)
    watched = Watched(other, loaded)
    with Checkpointer(other, loaded, folder, sigterm=False, readonly=True) as checkpointer:
        checkpointer.load(SAVED_AT, dry_run=True)
        watched.check()
        checkpointer.load(SAVED_AT)
    watched.close()
    loaded.zero_grad()
    train(other, loaded, SAVED_AT, END)
    for group in loaded.param_groups:
        assert group.pop("initial_lr") == 0.01 * (2 + rank)
    found, expected = (join_all([snapshot(*each)]) for each in ((other, loaded), (model, optimizer)))
    assert_same(found, expected)


@pytest.mark.parametrize("kind", OURS)
def test_stages(kind: str, tmp_path: Path) -> None:
    distributed.run(2, stages, kind, str(tmp_path))


def test_saves_change_no_option(tmp_path: Path) -> None:
    """Hooks of state dicts see the options that the user has set, during a save, too."""
    layer = nn.Linear(4, 4)
    optimizer = FusedAdamW(layer.parameters(), checkpoint_device="cpu")
    optimizer.initialize_state()
    seen = []
    optimizer.register_state_dict_pre_hook(lambda each: seen.append((each.checkpoint_format, each.checkpoint_device)))
    with Checkpointer(layer, optimizer, tmp_path) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    assert seen == [("unscaled", "cpu")] * 2
