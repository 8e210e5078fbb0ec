"""Optimizers of any kind in a Checkpointer: FusedLion's and torch.optim's, and checkpoints of another kind."""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import SGD, Adagrad, Adamax, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import distributed
from checkpoint_cases import values
from distributed import Part, assert_same, join_all, part, same_bits, shard_like
from fused_optim import FusedAdamW, FusedLion
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.storage import manifest
from fused_optim.checkpoint.storage.folders import folder_at
from fused_optim.sharding.collective import RaisedElsewhere
from fused_optim.sharding.dtensor import local_tensor
from pairwise import each_once

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVED_AT, END = 2, 4
SHAPES = {"frozen": (4, 2), "head": (3, 64), "matrix": (6, 128), "vector": (5,)}  # in the order of ParameterDict


class Counting(AdamW):
    """Whatever users count in their steps: in attributes, in lists and tensors that stay, in param groups."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls, self.log, self.total = 0, list[int](), torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.log.append(self.calls)
        self.total += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)


class Momentum(Optimizer):
    """Derived from the base alone: two states of other names, nested, and a number."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state.update(inner={"velocity": torch.zeros_like(param)}, updates=0)
                    state["inner"]["velocity"].mul_(0.5).add_(param.grad)
                    state["updates"] += 1
                    param.sub_(state["inner"]["velocity"], alpha=group["lr"] / state["updates"])


class Refusing(AdamW):
    """Fails late, on the last rank."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            raise ValueError("no")


class NeedsClosure(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


KINDS: dict[str, Callable[..., Optimizer]] = {
    "lion": lambda params, lr: FusedLion(params, lr=lr, state_dtype="int8"),
    "adam": lambda params, lr: FusedAdamW(params, lr=lr, state_dtype="int8"),
    "AdamW": AdamW,
    "amsgrad": lambda params, lr: AdamW(params, lr=lr, amsgrad=True),
    "SGD": SGD,
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "Adagrad": Adagrad,  # whose states are there from the start
    "RMSprop": RMSprop,
    "Adamax": Adamax,
    "Counting": Counting,
    "Momentum": Momentum,
    "Refusing": Refusing,
    "NeedsClosure": lambda params, lr: NeedsClosure(params, lr=lr, momentum=0.9),
}
TORCHS = [kind for kind in KINDS if kind not in ("lion", "adam", "Refusing")]


def build(kind: str, seed: int = 0, groups: int = 2) -> tuple[nn.Module, Optimizer]:
    """``seed``: other values and learning rates. In BF16 for this package's, which have masters then."""
    dtype = torch.bfloat16 if kind in ("lion", "adam") else torch.float32
    weights = {name: values(shape, seed, i).to(dtype) for i, (name, shape) in enumerate(SHAPES.items())}
    model = nn.ParameterDict({n: nn.Parameter(w, requires_grad=n != "frozen") for n, w in weights.items()})
    fully_shard(model, mesh=distributed.mesh())
    params = list(model.parameters())
    cut = params if groups == 1 else params[:2]
    listed = [{"params": cut, "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}][:groups]
    if kind == "Momentum":
        listed = [{"params": group["params"]} for group in listed]
    return model, KINDS[kind](listed, lr=0.01 if seed == 0 else 0.5)


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for i, param in enumerate(model.parameters()):
            if param.requires_grad:
                param.grad = shard_like(values(param.shape, 9, i, step).to(param.dtype), param)
        optimizer.step(*[None] * isinstance(optimizer, NeedsClosure))
        optimizer.zero_grad()


def users_entries(model: nn.Module, optimizer: Optimizer) -> None:
    """Of the frozen parameter, too, where torch.optim can load them."""
    for param in model.parameters():
        if param.requires_grad or not isinstance(optimizer, Adagrad | Adamax | RMSprop | AdamW):
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

    def __init__(self, model: nn.Module, optimizer: Optimizer, with_gradients: bool = True) -> None:
        self.model, self.optimizer, self.calls = model, optimizer, 0
        self.scheduler = ExponentialLR(optimizer, 0.5)
        optimizer.register_step_pre_hook(self._count)
        optimizer.register_step_post_hook(self._count)
        self._handle = register_optimizer_step_pre_hook(self._count)
        for param in model.parameters():
            param.grad = torch.ones_like(param) if with_gradients and param.requires_grad else None
        self.groups, self.objects = optimizer.param_groups, dict(vars(optimizer))
        self.before = self._now()

    def _count(self, *args: Any) -> None:
        self.calls += 1

    def _now(self) -> dict[str, Any]:
        own = vars(self.optimizer)
        params = list(self.model.parameters())
        kept = {name: own[name] for name in ("calls", "log", "total", "defaults", "_opt_called") if name in own}
        return copy.deepcopy(
            {
                "model": {name: local_tensor(value) for name, value in self.model.state_dict().items()},
                "versions": [param._version for param in params],
                "states": [_local(dict(self.optimizer.state.get(param, {}))) for param in params],
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
                "grads": [None if param.grad is None else local_tensor(param.grad) for param in params],
                "kept": kept,
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


def resumed(kind: str, folder: str, used: bool) -> tuple[dict[str, Part], Any, list[int]]:
    left_alone(kind, folder, used, None)
    model, optimizer = build(kind, seed=1)
    if used:
        train(model, optimizer, 0, 3)
    watched = Watched(model, optimizer)
    with Checkpointer(model, optimizer, folder, sigterm=False, readonly=True) as checkpointer:
        assert checkpointer.load(SAVED_AT) == SAVED_AT
        report = checkpointer.report
    watched.close()
    calls = [watched.calls, *([optimizer.calls, len(optimizer.log)] if isinstance(optimizer, Counting) else [])]
    optimizer.zero_grad()
    train(model, optimizer, SAVED_AT, END)
    return snapshot(model, optimizer), report, calls


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
def test_ours_resume(kind: str, form: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    results = check_resumed(kind, form, ranks, ranks[0] == 2, ranks[0] == 3, tmp_path)
    found = json.loads((tmp_path / f"step-{SAVED_AT:08d}" / manifest.FILE).read_text())
    assert (found["form"], found.get("optimizer", "adam")) == (form, kind)
    assert set(found["formats"]) == ({"exp_avg"} if kind == "lion" else {"exp_avg", "exp_avg_sq"})
    for _, report, calls in results:
        assert (report.optimizer.source, report.optimizer.parameters) == ("fused_optim", 3)
        assert report.optimizer.steps == (SAVED_AT, SAVED_AT) and calls == [0]


@pytest.mark.parametrize("kind, ranks", each_once(product(TORCHS, RANKS)), ids=str)
def test_torchs_resume(kind: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    """Users' counters, lists and entries as if nothing had been loaded, and no hook of a step has run."""
    used = ranks[0] == 2
    results = check_resumed(kind, "native", ranks, used, ranks[0] != 1, tmp_path)
    found = json.loads((tmp_path / f"step-{SAVED_AT:08d}" / manifest.FILE).read_text())
    assert (found["form"], found["formats"]) == (None, {})
    names = {"Counting": "AdamW", "amsgrad": "AdamW", "momentum": "SGD", "NeedsClosure": "SGD"}
    assert found["optimizer"] == ("Momentum" if kind == "Momentum" else f"torch.optim.{names.get(kind, kind)}")
    for _, report, calls in results:
        assert report.optimizer is None
        assert calls == [0, *[3 * used] * 2 * (kind == "Counting")]


# --- what is refused ------------------------------------------------------------------------------


def save_by_torch(kind: str, folder: str, spoil: Any = None, options: StateDictOptions | None = None) -> None:
    """Without a manifest, so that nothing names the optimizer."""
    model, optimizer = build(kind)
    train(model, optimizer, 0, SAVED_AT)
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)
    if spoil is not None:
        spoil(state)
    content = {"model": get_model_state_dict(model), "optimizer": state}
    dcp.save(content, checkpoint_id=f"{folder}/step-{SAVED_AT:08d}")


def lacks_a_state(state: dict[str, Any]) -> None:
    del state["state"]["head"]["exp_avg_sq"]


def has_another_shape(state: dict[str, Any]) -> None:
    state["state"]["head"]["exp_avg_sq"] = torch.zeros(3, 63)


def has_no_tensor(state: dict[str, Any]) -> None:
    state["state"]["head"]["exp_avg_sq"] = 3.0


def lacks_a_parameter(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].remove("head")


def lists_another(state: dict[str, Any]) -> None:
    state["param_groups"][1]["params"].append("other")


def moved(state: dict[str, Any]) -> None:
    """From one group to the other."""
    state["param_groups"][1]["params"].append(state["param_groups"][0]["params"].pop())


REFUSED: list[tuple[str, str, Any, str]] = [
    ("AdamW", "amsgrad", save, r"group 0: .* amsgrad=False \(here True\), on which max_exp_avg_sq depends"),
    ("amsgrad", "AdamW", save, r"group 0: .* amsgrad=True \(here False\), on which max_exp_avg_sq depends"),
    ("SGD", "momentum", save, r"momentum=0 \(here 0\.9\), on which momentum_buffer depends"),
    ("momentum", "SGD", save, r"momentum=0\.9 \(here 0\), on which momentum_buffer depends"),
    ("AdamW", "SGD", save, r"expected torch\.optim\.SGD, found torch\.optim\.AdamW; model_only=True loads the model"),
    ("SGD", "Counting", save, r"expected torch\.optim\.AdamW, found torch\.optim\.SGD"),
    ("AdamW", "SGD", save_by_torch, r"group 0: .* of another optimizer: it lacks dampening, momentum, nesterov"),
    ("SGD", "AdamW", save_by_torch, r"group 0: .* of another optimizer: it lacks amsgrad, betas, capturable, "),
    ("AdamW", "Adamax", save_by_torch, r"of another optimizer: it lacks exp_inf of head"),
    ("AdamW", "lion", save_by_torch, r"parameter 1 \('head', .* was saved with exp_avg_sq: another optimizer's"),
    ("lion", "AdamW", save_by_torch, r"group 0: .* of another optimizer: it lacks amsgrad, capturable, "),
    ("lion", "adam", save_by_torch, r"of another optimizer: expected the update rule adam, found lion"),
    ("adam", "lion", save_by_torch, r"of another optimizer: expected the update rule lion, found adam"),
    ("AdamW", "AdamW", lacks_a_state, r"lacks exp_avg_sq of head"),
    ("AdamW", "AdamW", has_another_shape, r"exp_avg_sq of head: expected shape \(3, 64\), found shape \(3, 63\)"),
    ("AdamW", "AdamW", has_no_tensor, r"exp_avg_sq of head: expected shape \(3, 64\), found an object"),
    ("AdamW", "AdamW", lacks_a_parameter, r"of another model: it lacks the states of head"),
    ("AdamW", "AdamW", lists_another, r"of another model: the model lacks 1 of its parameters: other"),
    ("AdamW", "AdamW", moved, r"other param groups: expected groups of \[2, 2\] parameters, found \[1, 3\]"),
]


def test_texts_in_states(tmp_path: Path) -> None:
    """Which torch.optim's own loader takes apart."""
    notes = {"text": "warm", "notes": {"seen": 7, "of": ["a", ("b", 1.5)], "sum": torch.ones(2)}, "bytes": b"ab"}
    param, again = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = AdamW(param.parameters()), AdamW(again.parameters())
    param.weight.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.state[param.weight].update(notes)
    with Checkpointer(param, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(1)
    assert Checkpointer(again, other, tmp_path, sigterm=False).load_latest() == 1
    own, loaded = optimizer.state[param.weight], other.state[again.weight]
    assert torch.equal(loaded["exp_avg"], own["exp_avg"]) and torch.equal(loaded["notes"].pop("sum"), torch.ones(2))
    assert {key: loaded[key] for key in ("text", "bytes")} == {"text": "warm", "bytes": b"ab"}
    assert loaded["notes"] == {"seen": 7, "of": ["a", ("b", 1.5)]}


class Rearranging(AdamW):
    """Whose states look otherwise once they are loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for states in self.state.values():
            states.update(mode=3, window=states["window"][-1:], notes={"new": True}, none=None)


def test_texts_replace_nothing_that_optimizers_put_there(tmp_path: Path) -> None:
    param, again = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    optimizer, other = Rearranging(param.parameters()), Rearranging(again.parameters())
    param.weight.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.state[param.weight].update(mode="warm", window=["a", "b"], notes={"old": "text"}, none=["x"], text="kept")
    with Checkpointer(param, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(1)
    assert Checkpointer(again, other, tmp_path, sigterm=False).load_latest() == 1
    loaded = other.state[again.weight]
    assert (loaded["mode"], loaded["notes"], loaded["none"]) == (3, {"new": True}, None)
    assert len(loaded["window"]) == 1 and loaded["text"] == "kept"


@pytest.mark.parametrize("saved, loaded, how, match", REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_does_not_fit_is_refused(saved: str, loaded: str, how: Any, match: str, tmp_path: Path) -> None:
    """On every rank, in one line, before anything was changed."""
    ranks = 1 + REFUSED.index((saved, loaded, how, match)) % 3
    if how in (save, save_by_torch):
        distributed.run(ranks, how, saved, str(tmp_path))
    else:
        distributed.run(ranks, save_by_torch, saved, str(tmp_path), how)
    for used in (False, True):
        distributed.run(ranks, left_alone, loaded, str(tmp_path), used, match)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
OTHER_GROUPS = [
    ("AdamW", None, r"other param groups: expected groups of \[4\] parameters, found \[2, 2\]"),
    ("AdamW", FLAT, r"different values of weight_decay for frozen and matrix, which are in one group"),
    ("lion", None, r"different values of weight_decay for parameter 0 \('frozen'"),
]


@pytest.mark.parametrize("kind, options, match", OTHER_GROUPS, ids=["nested", "flattened", "lion"])
def test_other_param_groups_are_refused(kind: str, options: Any, match: str, tmp_path: Path) -> None:
    distributed.run(2, save_by_torch, kind, str(tmp_path), None, options)
    distributed.run(2, left_alone, kind, str(tmp_path), False, match, 1)
    distributed.run(2, left_alone, kind, str(tmp_path), False, None)


def fails_late(folder: str) -> None:
    """Where torch.optim itself, or what users have added to it, fails with what was read."""
    save("AdamW", folder)
    for used in (False, True):
        left_alone("Refusing", folder, used, "no$")
    model, optimizer = build("RMSprop")
    optimizer.state[model["frozen"]]["mine"] = torch.ones(2)
    with Checkpointer(model, optimizer, f"{folder}/other", sigterm=False) as checkpointer:
        checkpointer.save(SAVED_AT)
    left_alone("RMSprop", f"{folder}/other", True, "RMSprop loads nothing of parameters that have no states of its own")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_fails_late_changes_nothing(ranks: int, tmp_path: Path) -> None:
    distributed.run(ranks, fails_late, str(tmp_path))


# --- kinds ----------------------------------------------------------------------------------------

MIXED = ("adam", "lion", "AdamW", "momentum")
NAMES = {"AdamW": "torch.optim.AdamW", "momentum": "torch.optim.SGD"}


def into_all_kinds(saved: str, folder: str) -> None:
    save(saved, folder)
    for loaded in MIXED:
        match = None
        if loaded != saved and (saved, loaded) != ("AdamW", "adam"):
            found, expected = (NAMES.get(kind, kind) for kind in (saved, loaded))
            match = rf"another optimizer: expected {expected}, found {found}; model_only=True loads the model alone"
        for used in (False, True):
            left_alone(loaded, folder, used, match)
        model, optimizer = build(loaded, seed=1)
        before = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        Checkpointer(model, optimizer, folder, sigterm=False, readonly=True).load(SAVED_AT, model_only=True)
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == before
        other, _ = build(saved, seed=1)
        Checkpointer(other, _, folder, sigterm=False, readonly=True).load(SAVED_AT)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_tensor(ours), local_tensor(theirs).to(ours.dtype))


@pytest.mark.parametrize("saved, ranks", [("adam", 1), ("lion", 2), ("AdamW", 3), ("momentum", 2)])
def test_each_kind_into_each(saved: str, ranks: int, tmp_path: Path) -> None:
    """By name on every rank; a FusedAdam takes AdamW's; the model alone is loaded from any."""
    distributed.run(ranks, into_all_kinds, saved, str(tmp_path))


def without_kind(saved: str, folder: str) -> None:
    """As earlier releases have saved: only a FusedAdam had a form."""
    save(saved, folder)
    if torch.distributed.get_rank() == 0:
        place = folder_at(f"{folder}/step-{SAVED_AT:08d}")
        found = manifest.read(place)
        assert found.optimizer == (None if saved == "adam" else NAMES.get(saved, saved))
        manifest.write(place, replace(found, optimizer=None, form=found.form if saved == "adam" else None))
        assert "optimizer" not in json.loads(place.read(manifest.FILE))
    torch.distributed.barrier()
    left_alone(saved, folder, False, None)
    if saved == "adam":
        left_alone("lion", folder, False, "another optimizer: expected lion, found adam")
        left_alone("AdamW", folder, False, r"another optimizer: expected torch\.optim\.AdamW, found adam")
    if saved == "AdamW":
        left_alone("adam", folder, False, None)
        left_alone("momentum", folder, False, "another optimizer: it lacks dampening, momentum")


@pytest.mark.parametrize("saved", MIXED)
def test_older_checkpoints_do_not_name_it(saved: str, tmp_path: Path) -> None:
    distributed.run(2, without_kind, saved, str(tmp_path))
    results = distributed.run(1, resumed, saved, str(tmp_path), False)
    found = {name: value for name, value in join_all([results[0][0]]).items() if "initial_lr" not in name}
    assert_same(found, join_all(distributed.run(1, straight, saved, False)))


def test_what_is_no_name_is_damage(tmp_path: Path) -> None:
    distributed.run(1, save, "AdamW", str(tmp_path))
    place = folder_at(tmp_path / f"step-{SAVED_AT:08d}")
    manifest.write(place, replace(manifest.read(place), optimizer=["x"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is damaged: expected the name of an optimizer"):
        manifest.read(place)


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


# --- saves, and models of FSDP1 -------------------------------------------------------------------


def save_before_the_first_step(kind: str, folder: str) -> dict[str, Part]:
    """It is no step: of one that has no states yet, or never has any."""
    model, optimizer = build(kind)
    watched = Watched(model, optimizer, with_gradients=False)
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        checkpointer.save(0)
    watched.close()
    watched.check()
    return {}


def resumed_from_the_start(kind: str, folder: str) -> dict[str, Part]:
    model, optimizer = build(kind, seed=1)
    with Checkpointer(model, optimizer, folder, sigterm=False, readonly=True) as checkpointer:
        assert checkpointer.load_latest() == 0
    train(model, optimizer, 0, END)
    return snapshot(model, optimizer)


@pytest.mark.parametrize("kind, ranks", [(kind, 1 + i % 3) for i, kind in enumerate(TORCHS)])
def test_saves_make_no_step(kind: str, ranks: int, tmp_path: Path) -> None:
    distributed.run(ranks, save_before_the_first_step, kind, str(tmp_path))
    found = join_all(distributed.run(3 - ranks % 3, resumed_from_the_start, kind, str(tmp_path)))
    found = {name: value for name, value in found.items() if "initial_lr" not in name}
    expected = join_all(distributed.run(1, straight, kind, False))
    if kind == "Momentum":
        expected = {name: value for name, value in expected.items() if "group" not in name or " lr" in name}
    assert_same(found, expected)


def flat_model(kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(layers, device_id=cpu, device_mesh=distributed.mesh(), use_orig_params=seed == 0)
    return model, KINDS[kind](model.parameters(), lr=0.1 * (seed + 1))


def flat_shards(kind: str, folder: str) -> None:
    def steps(model: nn.Module, optimizer: Optimizer) -> None:
        for _ in range(2):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = flat_model(kind, 0)
    steps(model, optimizer)
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        checkpointer.save(SAVED_AT)
    steps(model, optimizer)
    other, other_optimizer = flat_model(kind, 1)
    watched = Watched(other, other_optimizer)
    with Checkpointer(other, other_optimizer, folder, sigterm=False, readonly=True) as checkpointer:
        checkpointer.load(SAVED_AT, dry_run=True)
        watched.check()
        checkpointer.load(SAVED_AT)
    watched.close()
    other_optimizer.zero_grad()
    steps(other, other_optimizer)
    with FullyShardedDataParallel.summon_full_params(model), FullyShardedDataParallel.summon_full_params(other):
        for expected, found in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(found, expected)
    refused, wrong = flat_model("RMSprop", 1)
    watched = Watched(refused, wrong)
    with pytest.raises(ValueError, match=r"expected torch\.optim\.RMSprop, found"):
        Checkpointer(refused, wrong, folder, sigterm=False, readonly=True).load(SAVED_AT)
    watched.close()
    watched.check()


@pytest.mark.parametrize("kind", ["AdamW", "momentum", "SGD"])
def test_flat_shards(kind: str, tmp_path: Path) -> None:
    distributed.run(2, flat_shards, kind, str(tmp_path))


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
    wrong, refused = stage("RMSprop", 1)
    watched = Watched(wrong, refused)
    with pytest.raises(ValueError, match=r"expected torch\.optim\.RMSprop, found"):
        Checkpointer(wrong, refused, folder, sigterm=False, readonly=True).load(SAVED_AT)
    watched.close()
    watched.check()


@pytest.mark.parametrize("kind, ranks", [("lion", 2), ("AdamW", 2), ("Momentum", 3), ("SGD", 3)])
def test_stages(kind: str, ranks: int, tmp_path: Path) -> None:
    distributed.run(ranks, stages, kind, str(tmp_path))
