"""Modes of the thread that a step is made in, and what is changed of an optimizer in mid-run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cases
import distributed
from cases import values
from distributed import Part, assert_same, join_all, part, same_bits, shard_like
from fused_optim import enable_gradient_release
from fused_optim.step import plan as plans
from pairwise import pairwise
from peers import FusedAdamW, FusedLion

MASTERS = ["float32", "bfloat16+float32", "bfloat16+float16", "bfloat16+rem16", "bfloat16+rem8", "bfloat16"]
FORMATS = ["fp32", "bf16", "fp16", "fp8", "int8"]
BACKENDS = ["", "torch"]
SHAPES = [(6, 128), (7,), (2, 3, 64)]


def build(master: str, seed: int = 0, kind: Any = FusedAdamW, **options: Any) -> tuple[list[nn.Parameter], Any]:
    made = cases.MASTER[master]
    params = [nn.Parameter(values(s, made.param_dtype, "cpu", seed=seed + i)) for i, s in enumerate(SHAPES)]
    return params, kind(params, lr=0.01, weight_decay=0.1, **{**made.options, **options})


def train(params: list[nn.Parameter], optimizer: Any, *steps: int) -> None:
    for step in steps:
        for i, param in enumerate(params):
            param.grad = values(tuple(param.shape), param.dtype, "cpu", seed=100 * step + i)
        optimizer.step()


def contents(params: list[nn.Parameter], optimizer: Any) -> list[Tensor]:
    found = [param.detach() for param in params]
    for param in params:
        found += [state for state in optimizer.state[param].values() if isinstance(state, Tensor)]
        found.append(optimizer.store.layouts[param].scales)
    return found


# --- inference mode ---------------------------------------------------------------------------------------------------

BEFORE: dict[str, Callable[[FusedAdamW], Any]] = {
    "nothing": lambda optimizer: None,
    "clipping": lambda optimizer: optimizer.clip_grad_norm_(0.5),
    "states": lambda optimizer: optimizer.initialize_state(),
    "a load": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize(
    "master, fmt, options, before, backend",
    pairwise(
        MASTERS,
        FORMATS,
        [{}, {"skip_nonfinite": True}, {"capturable": True}, {"checkpoint_format": "torch"}],
        list(BEFORE),
        BACKENDS,
    ),
    ids=str,
)
def test_a_first_step_in_inference_mode(
    master: str,
    fmt: str,
    options: dict[str, Any],
    before: str,
    backend: str,
    use_backend: Callable[[str], None],
) -> None:
    """Whatever it allocates is written by later steps outside."""
    use_backend(backend)
    pairs = [build(master, state_dtype=fmt, **options) for _ in range(2)]
    for (params, optimizer), is_inference in zip(pairs, (True, False), strict=True):
        with torch.inference_mode(is_inference):
            for i, param in enumerate(params):
                param.grad = values(tuple(param.shape), param.dtype, "cpu", seed=i)
            BEFORE[before](optimizer)
            optimizer.found_inf = torch.zeros(())
            optimizer.step()
            saved = optimizer.state_dict()
        train(params, optimizer, 1, 2)
        optimizer.load_state_dict(saved)
        train(params, optimizer, 1)
    found = contents(*pairs[0])
    assert not any(tensor.is_inference() for tensor in found)
    assert all(map(same_bits, found, contents(*pairs[1])))
    assert [optimizer.store.groups[0]["step"] for _, optimizer in pairs] == [2, 2]


# --- denormals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS, ids=["engine", "torch"])
@pytest.mark.parametrize("master", ["float32", "bfloat16+float32", "bfloat16+rem16", "bfloat16"])
@pytest.mark.parametrize("scale", [None, 2e38])
def test_flushed_denormals_change_nothing(
    scale: float | None, master: str, backend: str, use_backend: Callable[[str], None]
) -> None:
    """Neither in elements, here of the squares, nor in scalars, here what gradients are multiplied by."""
    use_backend(backend)
    found = []
    for flushes in (False, True):
        params, optimizer = build(master)
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        grads = [1e-20 * (scale or 1.0) * values(s, torch.float32, "cpu", seed=i) for i, s in enumerate(SHAPES)]
        if not torch.set_flush_denormal(flushes):
            pytest.skip("this processor cannot flush denormals")
        try:
            for _ in range(3):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.to(param.dtype)
                optimizer.step()
            still_flushes = torch.full((), 1e-40).item() * 1e-280 == 0.0
        finally:
            torch.set_flush_denormal(False)
        assert still_flushes == flushes
        found.append([tensor.clone() for tensor in contents(params, optimizer)])
    assert all(map(same_bits, *found))


# --- parameters that are listed repeatedly ----------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("form", ["unscaled", "native", "torch"])
def test_a_repeated_parameter_is_updated_once(form: str, named: bool) -> None:
    """torch warns, and updates it repeatedly: here order would say what comes out."""
    (params, _), (others, usual) = build("float32"), build("float32", checkpoint_format=form)
    repeated: list[Any] = [params[0], params[1], params[0], params[2], params[1]]
    if named:
        repeated = [(f"{i}", param) for i, param in enumerate(repeated)]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = FusedAdamW(repeated, lr=0.01, weight_decay=0.1, checkpoint_format=form)
    assert optimizer.param_groups[0].get("param_names") == (["0", "1", "3"] if named else None)
    norms = []
    for each, made in ((params, optimizer), (others, usual)):
        train(each, made, 0)
        norms.append(made.clip_grad_norm_(0.5))
        made.zero_grad()
        train(each, made, 1)
        made.load_state_dict(made.state_dict())
        train(each, made, 2)
    assert norms[0] == norms[1]
    assert all(map(same_bits, contents(params, optimizer), contents(others, usual)))


# --- formats that are changed in mid-run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "master, before, after, kind, backend",
    pairwise(MASTERS, FORMATS, FORMATS, [FusedAdamW, FusedLion], BACKENDS),
    ids=str,
)
def test_states_follow_the_formats_of_their_group(
    master: str, before: str, after: str, kind: Any, backend: str, use_backend: Callable[[str], None]
) -> None:
    """As a new optimizer in these formats that has loaded them; masters stay bit for bit."""
    use_backend(backend)
    params, optimizer = build(master, kind=kind, state_dtype=before)
    train(params, optimizer, 0, 1)
    others, fresh = build(master, seed=50, kind=kind, state_dtype=after)
    with torch.no_grad():
        for other, param in zip(others, params, strict=True):
            other.copy_(param)
    fresh.load_state_dict(optimizer.state_dict())
    optimizer.state[params[0]]["mask"] = 1
    for option in optimizer.store.format_options:
        optimizer.param_groups[0][option] = after
    for param in params:
        param.grad = torch.ones_like(param).to_sparse()
    kept = [tensor.clone() for tensor in contents(params, optimizer)]
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(map(same_bits, contents(params, optimizer), kept))
    train(params, optimizer, 2, 3)
    train(others, fresh, 2, 3)
    assert optimizer.state[params[0]].pop("mask") == 1
    assert all(map(same_bits, contents(params, optimizer), contents(others, fresh)))


def test_what_keeps_its_format_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = build("bfloat16+float32")
    train(params, optimizer, 0)
    states = [optimizer.state[param]["exp_avg"] for param in params]
    monkeypatch.setattr(plans.Plan, "__init__", lambda *_: pytest.fail("a plan was made"))
    train(params, optimizer, 1)
    monkeypatch.undo()
    optimizer.param_groups[0]["exp_avg_dtype"] = "fp32"  # as it is, in another word
    train(params, optimizer, 2)
    assert all(optimizer.state[param]["exp_avg"] is state for param, state in zip(params, states, strict=True))


def test_formats_change_under_gradient_release() -> None:
    """Gradient release makes its own plans."""
    results = []
    for releases in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 16), nn.Linear(16, 128))
        optimizer = FusedAdamW(model.parameters(), lr=0.01)
        if releases:
            enable_gradient_release(model, optimizer, bucket_bytes=0)
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["exp_avg_dtype"] = "int8"
            model(values((4, 128), torch.float32, "cpu", seed=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(contents(list(model.parameters()), optimizer))
    assert all(map(same_bits, *results))


def convert_sharded() -> dict[str, Part]:
    torch.manual_seed(0)
    model = nn.Linear(128, 6, dtype=torch.bfloat16)
    fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdamW(model.parameters(), lr=0.01, state_dtype="int8")
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0].update(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp32")
        for i, param in enumerate(model.parameters()):
            grad = values(tuple(param.shape), param.dtype, "cpu", seed=10 * step + i)
            param.grad = shard_like(grad, param)
        optimizer.step()
    states = optimizer.state_dict()["state"]
    return {f"{i} {name}": part(value) for i, own in states.items() for name, value in own.items()}


def test_formats_change_alike_on_all_ranks() -> None:
    alone = join_all(distributed.run(1, convert_sharded))
    for ranks in (2, 3):
        assert_same(join_all(distributed.run(ranks, convert_sharded)), alone)
