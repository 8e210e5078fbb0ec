"""PinnedStager: its copies are the state at the call, whatever happens afterwards, and take each byte once."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import cases
import distributed
from checkpoint_cases import Run
from distributed import assert_same, same_bits
from fused_optim import FusedAdam, FusedLion
from fused_optim.checkpoint import PinnedStager
from fused_optim.checkpoint.stage import _is_captured, _memory_of, _Sources
from fused_optim.memory import host_memory
from fused_optim.memory.host_memory import HostBuffers
from fused_optim.quantized import QuantizedTensor
from fused_optim.sharding.dtensor import keep_chunks, local_tensor
from fused_optim.state.values import LazyTensor
from native_cases import tensors_of, train, trained
from pairwise import pairwise
from quantized_cases import Run as QuantizedRun
from quantized_cases import same_components

FORMS = ("unscaled", "native")
HOWS = {"fsdp": 2, "hsdp": 4, "tp": 4}


def values_of(tree: Any) -> dict[str, Tensor]:
    """Local values, read now; of quantized weights their codes."""
    found = {}
    for path, tensor in tensors_of(tree).items():
        local = local_tensor(tensor)
        if isinstance(local, QuantizedTensor):
            found |= {f"{path} {name}": value.clone() for name, value in local.components.items()}
        else:
            found[path] = local.detach().clone()
    return found


def state_of(run: Any, form: str, device: str | None) -> dict[str, Any]:
    run.optimizer.checkpoint_format, run.optimizer.checkpoint_device = form, device
    return dict(zip(("model", "optimizer"), get_state_dict(run.model, run.optimizer), strict=True))


def stage_and_train(how: str) -> None:
    """Every format and master of ``Run``; the values are those of a state dict that was made at the same time."""
    for master in ("remainder16", "remainder8", "float16", "float32"):
        run = Run(how, master)
        run.train(0, 2)
        staged = {}
        for form in FORMS:
            expected = values_of(state_of(run, form, None))
            for device in ("stager", None):
                staged[form, device] = expected, PinnedStager(run.optimizer).stage(state_of(run, form, device))
        run.train(2, 4)
        for (form, _), (expected, future) in staged.items():
            assert_same(values_of(future.result()), expected)
            later = values_of(state_of(run, form, None))
            assert sum(not same_bits(later[name], value) for name, value in expected.items()) > len(expected) // 3


@pytest.mark.parametrize("how", HOWS)
def test_copies_of_shards(how: str) -> None:
    distributed.run(HOWS[how], stage_and_train, how)


# Not all masters x formats x forms: each two of them.
@pytest.mark.parametrize(
    "master, fmt, form",
    pairwise(
        [cases.MASTER["bfloat16+rem16"], cases.MASTER["bfloat16+float16"]],
        [torch.int8, torch.float8_e4m3fn, torch.bfloat16],
        list(FORMS),
    ),
    ids=str,
)
def test_copies_on_one_rank(master: cases.Master, fmt: torch.dtype, form: str) -> None:
    model, optimizer = trained(master, fmt, form=form)
    expected = values_of(optimizer.state_dict())
    optimizer.checkpoint_device = "stager"
    staged = PinnedStager(optimizer).stage(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    assert_same(values_of(staged.result()), expected)
    optimizer.checkpoint_device = None
    assert any(not same_bits(value, expected[name]) for name, value in values_of(optimizer.state_dict()).items())


@pytest.mark.parametrize("recipe", ["delayed", "tiles", "nvfp4"])
def test_quantized_weights_are_copied_as_codes(recipe: str) -> None:
    run = QuantizedRun(recipe, how="plain")
    run.train(0, 2)
    expected = values_of(state_of(run, "native", None))
    before = run.model.state_dict()["uneven.weight"].clone()
    staged = PinnedStager(run.optimizer).stage(state_of(run, "native", "stager"))
    run.train(2, 4)
    run.model.uneven.weight.data.write_pending(torch.ones(run.model.uneven.weight.shape))  # which makes it stale
    weight = staged.result()["model"]["uneven.weight"]
    assert same_components(weight, before) and not weight.is_pending
    assert_same(values_of(staged.result()), expected)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "tiles", "nvfp4"])
def test_what_happens_to_a_weight_while_it_is_copied_did_not_happen_to_the_copy(recipe: str, kept: bool) -> None:
    """A copy is put together when the GPU is done, by then the weight may be another."""
    weight = QuantizedRun(recipe, how="plain").model.state_dict()["uneven.weight"]
    sources = _Sources()
    tree = sources.collect({"weight": weight})
    copied = [tensor.clone() for tensor in sources.tensors]
    before = weight.clone()
    if kept:
        weight.write_pending(torch.ones(weight.shape))
    else:
        weight.components = {name: torch.zeros(1) for name in weight.components}
    rebuilt = sources.rebuild(tree, copied)["weight"]
    assert same_components(rebuilt, before) and not rebuilt.is_pending


# --- bytes ------------------------------------------------------------------------------------------------------


def test_shared_bytes_are_copied_once_and_views_alone() -> None:
    large = torch.arange(1 << 20, dtype=torch.float32)
    tied = nn.Parameter(large[64:128].view(8, 8))
    state = {"view": large[:10], "tied": tied.detach(), "again": tied.detach(), "transposed": tied.detach().t()}
    staged = PinnedStager().stage(state).result()
    for name, tensor in state.items():
        assert torch.equal(staged[name], tensor)
        assert staged[name].untyped_storage().nbytes() == tensor.numel() * 4
    assert staged["tied"].data_ptr() == staged["again"].data_ptr()


def test_unscaled_states_are_copied_as_they_are_stored() -> None:
    """The master of remainders shares the bytes of the parameter."""
    model, optimizer = trained(cases.MASTER["bfloat16+rem16"], torch.int8, form="unscaled")
    optimizer.checkpoint_device = "stager"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    staged = PinnedStager(optimizer).stage(state).result()
    parameter = staged["model"]["conv"]
    states = staged["optimizer"]["state"][list(model).index("conv")]
    assert all(isinstance(states[name], LazyTensor) for name in ("exp_avg", "exp_avg_sq", "master_param"))
    assert states["master_param"].source.high.data_ptr() == parameter.data_ptr()
    assert states["exp_avg"].source.bits.dtype == torch.int8
    assert states["exp_avg"].source.bits.untyped_storage().nbytes() == parameter.numel()


def test_objects_and_what_is_no_plain_tensor() -> None:
    listed = [1, {"a": torch.ones(3)}, ("x", torch.zeros(()))]
    state = {
        "list": listed,
        "empty": {},
        "none": None,
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    expected_sparse = state["sparse"].to_dense().clone()
    staged = PinnedStager().stage(state).result()
    listed[1]["a"].zero_()
    listed.append(3)
    assert staged["list"][0] == 1 and staged["list"][2][0] == "x" and len(staged["list"]) == 3
    assert torch.equal(staged["list"][1]["a"], torch.ones(3))
    assert staged["empty"] == {} and staged["none"] is None and staged["meta"].is_meta
    assert torch.equal(staged["sparse"].to_dense(), expected_sparse)
    assert torch.equal(staged["negative"], torch.tensor([-2.0])) and not staged["negative"].is_neg()


def uneven_rows() -> None:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.full((3 if torch.distributed.get_rank() else 1, 4), 2.0)
    tensor = DTensor.from_local(local, distributed.mesh(), [Shard(0)], run_check=False, shape=(4, 4), stride=(4, 1))
    marked = torch.empty(0)
    marked.__create_chunk_list__, marked.__create_write_items__ = (lambda: ["rows"]), (lambda fqn, tensor: [fqn])
    keep_chunks(tensor, marked)
    staged = PinnedStager().stage({"x": tensor}).result()["x"]
    assert staged.__create_chunk_list__() == ["rows"] and staged.__create_write_items__("x", staged) == ["x"]
    assert torch.equal(staged._local_tensor, local) and staged._local_tensor.data_ptr() != local.data_ptr()


def test_chunk_lists_of_uneven_shards_are_kept() -> None:
    distributed.run(2, uneven_rows)


# --- memory -----------------------------------------------------------------------------------------------------


def test_buffers_are_used_again_once_nobody_has_them() -> None:
    stager, tensor = PinnedStager(), torch.zeros(1000)

    def stage(value: float) -> dict[str, Any]:
        tensor.fill_(value)
        return stager.stage({"x": tensor}).result()

    first = stage(1.0)
    address = first["x"].data_ptr()
    second = stage(2.0)  # while the first is being written
    assert second["x"].data_ptr() != address and torch.equal(first["x"], torch.ones(1000))
    other = second["x"].data_ptr()
    del first, second
    gc.collect()
    third, fourth = stage(3.0), stage(4.0)
    assert {third["x"].data_ptr(), fourth["x"].data_ptr()} == {address, other}
    fifth = stage(5.0)  # more than two: memory that is not kept
    assert [staged["x"][0].item() for staged in (third, fourth, fifth)] == [3.0, 4.0, 5.0]


def test_memory_of_inference_mode_serves_others() -> None:
    stager, source = PinnedStager(), torch.zeros(3)
    for inference in (True, False):
        source += 1
        with torch.inference_mode(inference):
            assert torch.equal(stager.stage({"a": source}).result()["a"], source)
        gc.collect()


def test_memory_is_allocated_before_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    stager, state = PinnedStager(), {"x": torch.ones(5000), "y": [torch.ones(3)]}
    stager.prepare(state).result()
    monkeypatch.setattr("fused_optim.checkpoint.stage.HostBuffers", None)
    assert torch.equal(stager.stage(state).result()["x"], state["x"])
    with pytest.raises(TypeError):  # of another size
        stager.stage({"x": torch.ones(5001)})


def test_page_locking_rests_until_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver launches nothing while it locks pages: in between, training has as much time as that took."""
    clock = itertools.count(0, 1000)  # every look at it comes 1000 seconds later
    monkeypatch.setattr(host_memory, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(host_memory, "_SEGMENT", 1 << 18)
    monkeypatch.setattr(host_memory, "_lock", lambda whole: None)
    monkeypatch.setattr(host_memory, "_unlock", lambda address: None)
    monkeypatch.setattr(_Sources, "on_gpu", True)
    state = {str(i): torch.full((200 << 10,), i, dtype=torch.uint8) for i in range(3)}
    rests: list[float] = []
    HostBuffers([len(each) for each in state.values()], locked=True, shared=False, rest=rests.append)
    assert rests == [1000.0] * 3
    stager = PinnedStager()
    preparing = stager.prepare(state)
    with pytest.raises(TimeoutError):
        preparing.result(timeout=0.3)
    assert torch.equal(stager.stage(state).result()["2"], state["2"]) and preparing.done()


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion])
def test_what_steps_change_whatever_the_rule(kind: type[FusedAdam] | type[FusedLion]) -> None:
    """Bits, scales and parameters; of captured steps nobody knows when. Ours wait without a hook of the stager's."""
    param = nn.Parameter(torch.randn(4, 128).bfloat16())
    optimizer = kind([param], state_dtype="int8")
    param.grad = torch.ones_like(param)
    optimizer.step()
    layout = optimizer.store.layouts[param]
    found = {tensor.untyped_storage().data_ptr() for tensor in (param, layout.scales, *optimizer.state[param].values())}
    assert _memory_of([optimizer]) == found and len(found) == 3 + len(optimizer.rule.states)
    assert not _is_captured(optimizer)
    optimizer.stepper.scalars.captured = True
    assert _is_captured(optimizer)
    PinnedStager(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("shared", [False, True])
def test_host_buffers(shared: bool) -> None:
    """Parts do not overlap; each has a storage of its own size."""
    sizes = [0, 5, 70_000, (1 << 20) + 1, 1 << 20, 3]
    tensors = HostBuffers(sizes, locked=False, shared=shared).tensors
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    assert [tensor.numel() for tensor in tensors] == sizes
    assert all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert all(tensor.is_shared() == shared for tensor in tensors)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel()] == sizes[1:]


# --- state dicts for a stager -------------------------------------------------------------------------------------


def test_state_dicts_for_a_stager_refer_to_the_states() -> None:
    model, optimizer = trained(cases.MASTER["bfloat16+rem16"], torch.int8)
    optimizer.checkpoint_device = "stager"
    states = optimizer.state_dict()["state"][list(model).index("conv")]
    kept = optimizer.state[model["conv"]]
    assert states["exp_avg"]["bits"].data_ptr() == kept["exp_avg"].data_ptr()
    assert states["master_param"]["rem16"].data_ptr() == kept["master_param"].data_ptr()


@pytest.mark.parametrize("act", [torch.zeros_like, torch.empty_like, lambda x: x.new_empty(3), lambda x: x.zero_()])
def test_others_cannot_copy_or_write_what_is_made_later(act: Callable[[Tensor], Any]) -> None:
    model, optimizer = trained(cases.MASTER["bfloat16+rem16"], torch.int8, form="unscaled")
    optimizer.checkpoint_device = "stager"
    lazy = optimizer.state_dict()["state"][list(model).index("conv")]["exp_avg"]
    with pytest.raises(TypeError, match=r"checkpoint_device = None|cannot write"):
        act(lazy)


def test_what_is_made_later_reads_as_usual() -> None:
    model, optimizer = trained(cases.MASTER["bfloat16+rem16"], torch.int8, form="unscaled")
    expected = optimizer.state_dict()
    optimizer.checkpoint_device = "stager"
    lazy = optimizer.state_dict()
    other = FusedAdam(model.parameters(), exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.int8)
    other.load_state_dict(lazy)
    assert_same(values_of(lazy), values_of(expected))
    assert_same(tensors_of(other.state_dict()["state"]), tensors_of(expected["state"]))
