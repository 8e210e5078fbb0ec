"""The engines read torch's tensors without asking DLPack where they know how these lie in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fused_optim.backends import compiled, load_engine
from fused_optim.backends.engine import EngineTensorReader

API = getattr(Tensor, "__dlpack_c_exchange_api__", None)
pytestmark = pytest.mark.skipif(
    load_engine("cpu")[0] is None or API is None, reason="no engine, or a torch without DLPack's exchange API"
)
CPU = torch.device("cpu")

DENSE: dict[str, Callable[[], Tensor]] = {
    **{str(dtype): lambda dtype=dtype: torch.ones(3, 4, dtype=dtype) for dtype in compiled.ELEMENT_TYPES},
    "int8": lambda: torch.ones(5, dtype=torch.int8),
    "float64": lambda: torch.ones(5, dtype=torch.float64),
    "scalar": lambda: torch.ones(()),
    "offset": lambda: torch.ones(9, dtype=torch.bfloat16)[4:],
    "rows": lambda: torch.ones(6, 8)[2:4],
    "six dims": lambda: torch.ones(1, 2, 1, 2, 1, 2),
    "one column": lambda: torch.ones(4, 8)[1:2, 2:5],
    "named device": lambda: torch.ones(3, device="cpu:0"),
    "foreign memory": lambda: torch.frombuffer(bytearray(16), dtype=torch.float32),
}
UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "strided": lambda: torch.ones(4, 4)[:, ::2],
    "transposed": lambda: torch.ones(2, 3).t(),
    "six dims, transposed": lambda: torch.ones(1, 2, 1, 2, 1, 3).transpose(1, 5),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "zeros without memory": lambda: torch._efficientzerotensor((3,)),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "subclass": lambda: torch.nn.Parameter(torch.ones(3)),
}


def reader(examples: list[tuple[Tensor, int, int, int]] | None = None) -> EngineTensorReader:
    """That of the CPU, or one that is told other things of its examples."""
    if examples is None:
        return compiled.tensor_reader(CPU)
    engine, _ = load_engine("cpu")
    assert engine is not None
    ordinary = torch.ones(1)
    keys = [(x, torch._C._dispatch_keys(x).raw_repr()) for x in (ordinary, torch._neg_view(ordinary))]
    copied = [compiled._example(torch._lazy_clone(torch.ones(1))) for _ in range(2)]
    return engine.TensorReader(API, Tensor, keys, examples, copied)


def misled() -> EngineTensorReader:
    """As with a torch whose tensors lie in another way: DLPack has to be asked."""
    examples = [compiled._example(x) for x in compiled._layout_examples(CPU)]
    return reader([(tensor, storage + 8, *others) for tensor, storage, *others in examples])


def test_this_torch_is_known() -> None:
    assert reader().reads_directly
    assert reader([compiled._example(x) for x in compiled._layout_examples(CPU)]).reads_directly
    assert not misled().reads_directly
    assert not reader([]).reads_directly


def addresses(reader: EngineTensorReader, tensors: list[Tensor | None]) -> list[int] | None:
    found = reader.addresses(tensors)
    return None if found is None else found.tolist()


@pytest.mark.parametrize("make", [reader, misled])
def test_addresses(make: Callable[[], EngineTensorReader]) -> None:
    tensors = {name: dense() for name, dense in DENSE.items()}
    expected = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert dict(zip(tensors, addresses(make(), [*tensors.values()]) or [], strict=True)) == expected
    assert addresses(make(), [None, tensors["rows"], None]) == [0, expected["rows"], 0]


@pytest.mark.parametrize("make", [reader, misled])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_has_no_address(make: Callable[[], EngineTensorReader], kind: str) -> None:
    assert addresses(make(), [torch.ones(3), UNUSUAL[kind]()]) is None


@pytest.mark.parametrize("make", [reader, misled])
def test_memory_that_moves_is_followed(make: Callable[[], EngineTensorReader]) -> None:
    """Although the object stays."""
    tensor, other = torch.ones(2, 3), torch.ones(2, 3)
    tensor.data = other
    assert addresses(make(), [tensor]) == [other.data_ptr()]
    tensor.set_(torch.ones(9)[3:])
    assert addresses(make(), [tensor]) == [tensor.data_ptr()]
    tensor.resize_(3, 2).t_()
    assert addresses(make(), [tensor]) is None
    tensor.t_().untyped_storage().resize_(0)
    assert addresses(make(), [tensor[:0]]) == [0]
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    assert addresses(make(), [freed]) == [0]


@pytest.mark.parametrize("part", [slice(None), slice(3, 5)], ids=["all", "end"])
def test_memory_that_ends_too_early_is_none(part: slice) -> None:
    tensor = torch.ones(5, 2)
    found, before = tensor[part], tensor[:3]
    checks = compiled.tensor_reader(CPU, "cpu", checks_ends=True)
    assert addresses(checks, [found]) == [found.data_ptr()]
    tensor.untyped_storage().resize_(9 * 4)
    assert addresses(checks, [found, before]) == [0, before.data_ptr()]


def written(times: int) -> Tensor:
    tensor = torch.ones(2)
    for _ in range(times):
        tensor.zero_()
    return tensor


def test_a_write_of_an_engine_is_counted() -> None:
    tensors = [written(1), torch.nn.Parameter(written(2)), written(3)[:1]]
    with torch.inference_mode():
        uncounted = torch.ones(2)
    compiled.increment_versions([*tensors, uncounted])
    compiled.increment_versions(tensors[:1])
    assert [x._version for x in tensors] == [3, 3, 4]


def test_the_same_objects() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert compiled.same_objects([a, b], [a, b]) and compiled.same_objects((a, b), [a, b])
    assert not compiled.same_objects([a, b], [b, a])
    assert not compiled.same_objects([a], [a, b]) and not compiled.same_objects([a, b], [a])


@pytest.mark.parametrize("has_engine", [True, False])
def test_the_same_objects_without_keeping_them(has_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_engine:
        monkeypatch.setattr(compiled, "any_engine", lambda: None)
    a, b = torch.ones(2), torch.ones(2)
    objects = compiled.Identities([a, b])
    assert objects.are([a, b]) and objects.are((a, b))
    assert not any(map(objects.are, ([b, a], [a], [a, b, a], [])))
    one = {}
    values = compiled.Identities([1, one])
    assert objects.are_items({a: 1, b: one}, objects, values)
    for changed in ({a: 1}, {b: one, a: 1}, {a: 1, b: {}}, {a: 1, b: one, "c": 3}):
        assert not objects.are_items(changed, objects, values)
    before = weakref.ref(a)
    del a, changed
    gc.disable()
    try:
        assert before() is None
    finally:
        gc.enable()
