"""Loads of what is not quite this model: refused with what differs, or loaded as far as it fits, by name."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distributed
from fused_optim import FusedAdamW, FusedLion, LoadReport, load_optimizer_checkpoint
from fused_optim.checkpoint import Checkpointer
from pairwise import each_once, pairwise

OPTIMIZERS: dict[str, Callable[..., FusedAdamW | FusedLion]] = {
    "float32": FusedAdamW,
    "int8": partial(FusedAdamW, state_dtype=torch.int8),
    "lion": partial(FusedLion, state_dtype=torch.int8),
}


class Model(nn.Module):
    """A body of ``layers``, and a head of ``classes``."""

    def __init__(self, layers: int = 2, classes: int = 6, body: str = "body", dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(layers + classes)
        self.names = body, "head"
        self.add_module(body, nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))))
        self.head = nn.Linear(64, classes)
        self.register_buffer("seen", torch.zeros(1))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


def build(how: str, fmt: str = "float32", dtype: torch.dtype = torch.float32, **model: Any) -> tuple[Model, Any]:
    built = Model(**model, dtype=dtype)
    if how == "fsdp":
        fully_shard(built, mesh=distributed.mesh())
    return built, OPTIMIZERS[fmt](built.parameters(), lr=1e-2)


def train(model: Model, optimizer: Any, steps: int = 2) -> None:
    dtype = model.head.weight.dtype
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 64, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(value: Any) -> Tensor:
    found = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone()


def snapshot(model: Model, optimizer: Any) -> dict[str, Tensor]:
    """By name: weights, and the states in FP32."""
    names = {param: name for name, param in model.named_parameters()}
    found = {name: full(param) for name, param in model.named_parameters()}
    found |= {name: full(buffer) for name, buffer in model.named_buffers()}
    state = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, states in state["state"].items():
        found |= {
            f"{names[params[i]]}.{key}": full(value) for key, value in states.items() if isinstance(value, Tensor)
        }
    return {name.replace(model.names[0] + ".", "body."): value for name, value in found.items()}


def save(how: str, folder: str, fmt: str, form: str, dtype: torch.dtype, **model: Any) -> dict[str, Tensor]:
    built, optimizer = build(how, fmt, dtype, **model)
    train(built, optimizer)
    with Checkpointer(built, optimizer, folder, format=form, sigterm=False) as checkpointer:
        checkpointer.save(2)
    return snapshot(built, optimizer)


def load(how: str, folder: str, fmt: str, model: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """What was before and is after; the report; what was raised."""
    built, optimizer = build(how, fmt, **model)
    train(built, optimizer, 1)
    before = snapshot(built, optimizer)
    checkpointer = Checkpointer(built, optimizer, folder, sigterm=False)
    error = None
    try:
        assert checkpointer.load_latest(**options) == 2
    except Exception as caught:
        error = caught
    return before, snapshot(built, optimizer), checkpointer.report, error


def same(found: dict[str, Tensor], expected: dict[str, Tensor], keys: Any = None) -> bool:
    keys = expected.keys() if keys is None else keys
    return all(key in found and torch.equal(found[key], expected[key]) for key in keys)


WAYS = [("plain", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)]
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("smaller", {"layers": 1}, r"the model lacks 2 of its tensors: body\.1\.bias; body\.1\.weight"),
    ("larger", {"layers": 3}, r"it lacks 2 of the 9 tensors of the model: body\.2\.weight; body\.2\.bias"),
    ("reshaped", {"classes": 7}, r"2 differ in shape: head\.weight: expected shape \(7, 64\), found shape \(6, 64\)"),
    (
        "renamed",
        {"body": "trunk"},
        r"it lacks 4 of .*trunk\.0\.weight.*the model lacks 4 of its tensors: body\.0\.bias",
    ),
]


def renamed_body(name: str) -> str:
    return name.replace("body", "trunk")


def refusals(how: str, folder: str) -> list[str]:
    texts = []
    save(how, folder, "int8", "native", torch.float32)
    for _, model, _ in OTHERS:
        for options in ({}, {"partial": ["nothing.*"]}, {"dry_run": True}):
            before, after, report, error = load(how, folder, "int8", model, **options)
            assert isinstance(error, ValueError | RuntimeError) and report is None
            assert after.keys() == before.keys() and same(after, before)
        texts.append(str(error))
    return texts


@pytest.mark.parametrize("how, ranks", [("plain", 1), ("fsdp", 2)])
def test_another_model_is_refused_before_anything_is_changed(how: str, ranks: int, tmp_path: Path) -> None:
    for texts in distributed.run(ranks, refusals, how, str(tmp_path)):
        for text, (_, _, match) in zip(texts, OTHERS, strict=True):
            assert "\n" not in text
            assert re.search(match, text), text


RENAMED = {f"body.{layer}.{kind}": f"trunk.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")}
HEAD, BODY = {"head.weight", "head.bias"}, "body."
# By what changed: the model; what the report lists; keys that are loaded (None: all); names that start anew; options.
FITS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Any, dict[str, Any]]] = {
    "smaller": (
        {"layers": 1}, {"removed": {"body.1.weight", "body.1.bias"}}, {*HEAD, "body.0.weight"}, {}, {"strict": False}
    ),
    "larger": (
        {"layers": 3}, {"new": {"body.2.weight", "body.2.bias"}}, BODY, {"body.2.weight"}, {"partial": ["body.2.*"]}
    ),
    "reshaped": ({"classes": 7}, {"reshaped": HEAD}, BODY, HEAD, {"partial": ["head.*"]}),
    **{
        f"renamed by {way}": (
            {"body": "trunk"}, {"renamed": RENAMED, "new": {}, "removed": {}}, None, {}, {"rename": rename}
        )
        for way, rename in (("parts", {"body": "trunk"}), ("names", RENAMED), ("function", renamed_body))
    },
    "renamed, smaller, reshaped": (
        {"body": "trunk", "layers": 1, "classes": 3},
        {"renamed": {new: old for new, old in RENAMED.items() if "1" not in new}},
        {"body.0.weight.exp_avg"},
        HEAD,
        {"rename": {"body": "trunk"}, "strict": False},
    ),
}  # fmt: skip


def loads_what_fits(how: str, folder: str, stored: tuple[str, str], changed: str) -> None:
    saved = save(how, folder, *stored, torch.float32)
    assert {key for key in saved if key.startswith(BODY) and key.count(".") == 2} == set(RENAMED)
    model, expected, loaded, kept, options = FITS[changed]
    if loaded == BODY:
        loaded = {key for key in saved if key.startswith(BODY)}
    before, after, report, error = load(how, folder, stored[0], model, dry_run=True, **options)
    assert error is None and same(after, before), error
    before, after, again, error = load(how, folder, stored[0], model, **options)
    assert error is None and again == report, error
    for name, value in expected.items():
        assert set(getattr(report.model, name)) == set(value), name
        parameters = {each for each in value if "seen" not in each}
        assert set(getattr(report.optimizer.differences, name)) == parameters, name
    assert same(after, saved, loaded) and same(after, before, kept)
    for name in kept:  # what starts anew
        assert not after.get(f"{name}.exp_avg", torch.zeros(1)).any()


STORED = [("float32", "unscaled"), ("int8", "native"), ("int8", "unscaled"), ("lion", "native"), ("lion", "unscaled")]


# Not all ways x formats x changes: each two of them, and in the usual run each once.
@pytest.mark.parametrize("way, stored, changed", each_once(pairwise(WAYS, STORED, list(FITS))), ids=str)
def test_what_fits_is_loaded(way: tuple[str, int], stored: tuple[str, str], changed: str, tmp_path: Path) -> None:
    how, ranks = way
    distributed.run(ranks, loads_what_fits, how, str(tmp_path), stored, changed)


def loads_the_model_alone(how: str, folder: str) -> None:
    saved = save(how, folder, "int8", "native", torch.bfloat16)
    before, after, report, error = load(how, folder, "int8", {"dtype": torch.bfloat16}, model_only=True)
    weights = {key for key in saved if key.count(".") < 3 and "exp" not in key and "master" not in key}
    moments = {key for key in saved if "exp_avg" in key}
    assert error is None and report.optimizer is None and not report.model
    assert same(after, saved, weights) and same(after, before, moments) and not same(before, saved, moments)


@pytest.mark.parametrize("how, ranks", [("plain", 1), ("fsdp", 2)])
def test_the_model_alone(how: str, ranks: int, tmp_path: Path) -> None:
    distributed.run(ranks, loads_the_model_alone, how, str(tmp_path))


@pytest.mark.parametrize("rename", [lambda name: None, {"body": None}, {"body.0": 3}])
def test_names_that_are_none_are_refused(rename: Any, tmp_path: Path) -> None:
    save("plain", str(tmp_path), "int8", "native", torch.float32)
    before, after, report, error = load("plain", str(tmp_path), "int8", {}, rename=rename, strict=False)
    assert isinstance(error, TypeError) and "rename: expected a name for " in str(error)
    assert report is None and same(after, before)


def test_names_that_mean_the_same_are_refused(tmp_path: Path) -> None:
    save("plain", str(tmp_path), "int8", "native", torch.float32)
    rename = {"body.0": "body.1"}
    before, after, _, error = load("plain", str(tmp_path), "int8", {}, rename=rename, strict=False)
    assert isinstance(error, ValueError) and "are both loaded as body.1." in str(error) and same(after, before)


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"partial": "head.*"}, TypeError, "partial: expected a list of names"),
        ({"rename": "head"}, TypeError, "rename: expected a mapping or a function"),
        ({"without": "loader"}, TypeError, "without: expected a list of names"),
        ({"partial": [1]}, TypeError, "partial: expected a list of names"),
        ({"partial": None}, TypeError, "partial: expected a list of names"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], match: str, tmp_path: Path) -> None:
    checkpointer = Checkpointer(*build("plain"), tmp_path, sigterm=False)
    with pytest.raises(error, match=match):
        checkpointer.load_latest(**options)


# --- the optimizer alone ---------------------------------------------------------------------------------------------


def test_an_optimizer_checkpoint_loads_as_far_as_it_fits(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)  # type: ignore[arg-type]
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    named = {"state": {names[i]: states for i, states in state["state"].items()}}
    named["param_groups"] = [{**state["param_groups"][0], "params": names}]  # type: ignore[assignment]
    torch.save(named, tmp_path / "adamw.pt")

    other, fused = build("plain", body="trunk", layers=3, classes=7)
    with pytest.raises(ValueError, match=r"another model: it lacks the states of 6 of 8 parameters"):
        load_optimizer_checkpoint(other, fused, tmp_path / "adamw.pt")
    report = load_optimizer_checkpoint(
        other, fused, tmp_path / "adamw.pt", rename={"body": "trunk"}, partial=["trunk.2.*", "head.*"]
    )
    assert isinstance(report, LoadReport) and report.parameters == 4 and report.steps == (2,)
    assert set(report.differences.new) == {"trunk.2.weight", "trunk.2.bias"}
    assert set(report.differences.reshaped) == {"head.weight", "head.bias"}
    assert "4 renamed (body.0.bias -> trunk.0.bias" in str(report)
    after = snapshot(other, fused)
    for name in ("body.0.weight", "body.1.bias"):
        saved = named["state"][name]["exp_avg"]
        assert torch.equal(after[f"{name}.exp_avg"], saved)


@pytest.mark.parametrize("partial", [(), ["head.*"]])
def test_what_starts_anew_is_behind_nothing(partial: Any, tmp_path: Path) -> None:
    """No warning speaks of parameters that were saved at other steps, whether others go on or none."""
    model, optimizer = build("plain")
    train(model, optimizer)
    kept = model if partial else nn.ModuleDict({"head": model.head})
    optimizer = FusedAdamW(kept.parameters())
    train(model, optimizer)
    with Checkpointer(kept, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(2)
    model, _ = build("plain", classes=7)
    kept = model if partial else nn.ModuleDict({"head": model.head})
    optimizer = FusedAdamW(kept.parameters())
    checkpointer = Checkpointer(kept, optimizer, tmp_path, sigterm=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointer.load(2, partial=partial, strict=bool(partial))
    report = checkpointer.report
    assert report is not None and report.optimizer is not None
    assert report.optimizer.steps == ((2,) if partial else (0,))
    assert set(report.optimizer.differences.reshaped) == {"head.weight", "head.bias"}


# --- replicas that are none -------------------------------------------------------------------------------------------


def replicas(folder: str, what: str) -> Any:
    model = nn.Sequential(OrderedDict(linear=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(1)
    rank = torch.distributed.get_rank()
    optimizer = FusedAdamW(model.parameters())
    model(torch.ones(2, 4) * (rank + 1 if what == "buffers" else 1))
    torch.manual_seed(rank if what == "gradients" else 0)  # otherwise as DDP averages them
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    if what == "moments":
        for states in optimizer.state.values():
            states["exp_avg"].fill_(rank)
    checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
    checkpointer.save(1)
    try:
        checkpointer.wait()
    except RuntimeError as error:
        return str(error)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(7)
    checkpointer.load(1)
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("what", ["same", "buffers", "gradients", "moments"])
def test_replicas_that_differ(what: str, tmp_path: Path) -> None:
    """Of buffers the first rank's are saved, all of them; of parameters and states nothing, with their names."""
    results = distributed.run(3, replicas, str(tmp_path), what)
    if what in ("same", "buffers"):
        for found in results:
            torch.testing.assert_close(found["norm.running_mean"], torch.full((4,), 0.9 + 0.1 * 5))  # of input 1
            assert found["norm.num_batches_tracked"] == 2
    else:
        expected = (
            r"different values of model\.linear\.\w+; " if what == "gradients" else r"optimizer\.state\.\S+\.exp_avg"
        )
        assert all(re.search(expected, found) for found in results), results[0]
        assert not list(tmp_path.glob("step-*"))
