"""Views of quantized weights show them; writes into columns, diagonals and the like raise: nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim.quantized import QuantizedTensor, finish_initialization
from quantized_cases import RECIPES, has_tiles, same_components, values
from weight_cases import EXPERTS, MATRIX, pair, shapes_of

EACH = pytest.mark.parametrize("recipe", RECIPES)
View = Callable[[Tensor], Tensor]

VIEWS: dict[str, View] = {
    "whole": lambda w: w,
    "row": lambda w: w[1],
    "last row": lambda w: w[-1],
    "column": lambda w: w[:, 3],
    "element": lambda w: w[1, 2],
    "every other row": lambda w: w[::2],
    "rows": lambda w: w[: len(w) // 2] if len(w) < 128 else w[:128],
    "last columns": lambda w: w[..., w.shape[-1] // 2 :],
    "columns of columns": lambda w: w[..., w.shape[-1] // 2 :][..., 3],
    "in the middle": lambda w: w[:, w.shape[1] // 2 :],
    "view": lambda w: w.view(2, -1, w.shape[-1])[1],
    "view of a part": lambda w: w.view(2, 2, -1)[1, 0, 5:9],
    "diagonal": lambda w: w.diagonal(),
    "unsqueezed": lambda w: w.unsqueeze(0),
    "with none": lambda w: w[None, 2],
    "squeezed": lambda w: w[2:3].squeeze(0) if len(w) < 128 else w[2].unsqueeze(0).squeeze(0),
    "unbound": lambda w: w.unbind(0)[2],
    "unbound columns": lambda w: w.unbind(1)[2],
    "transposed": lambda w: w.transpose(0, 1),
    "row of the transposed": lambda w: w.mT[..., 3, :],
    "permuted": lambda w: w.permute(*range(w.dim() - 1, -1, -1)),
    "moved": lambda w: w.movedim(0, -1),
    "flat": lambda w: w.flatten(),
    "part of the flat": lambda w: w.view(-1)[3:40],
    "flat rows": lambda w: w.flatten(1)[1],
    "expanded": lambda w: w.expand(1, *w.shape),
    "unfolded": lambda w: w.unfold(0, 2, 2),
    "chunk in the middle": lambda w: w.chunk(2, 1)[1],
    "split": lambda w: w.tensor_split(2, dim=1)[0],
    "unflattened": lambda w: w.unflatten(0, (2, -1))[1],
    "swapped": lambda w: w.swapaxes(0, 1)[1],
    "detached": lambda w: w[1].detach()[2:4].detach(),
    "nothing": lambda w: w.flatten()[4:4],
}
STRIDED = [
    "column",
    "element",
    "every other row",
    "columns of columns",
    "diagonal",
    "unbound columns",
    "moved",
    "part of the flat",
]
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda x: x.fill_(7.0),
    "normal_": lambda x: x.normal_(),
    "+=": lambda x: x.__iadd__(1.0),
    "set": lambda x: x.__setitem__(..., 3.0),
    "mask": lambda x: x.masked_fill_(torch.ones(x.shape, dtype=torch.bool, device=x.device), 2.0),
    "out": lambda x: torch.add(torch.ones(x.shape, device=x.device), 1.0, out=x),
    "foreach": lambda x: torch._foreach_add_([x, torch.ones(2, device=x.device)], 1.0),
    "copy_": lambda x: x.copy_(values(x.shape, 5)),
    "foreach copy": lambda x: torch._foreach_copy_([x], [values(x.shape, 6)]),
}


@EACH
def test_views_show_the_decoded_weight(recipe: str, device: str) -> None:
    for shape in shapes_of(recipe):
        model, plain = pair(recipe, shape, keep_initial=False, device=device)
        for name, view in VIEWS.items():
            shown, expected = view(model.weight), view(plain)
            assert isinstance(shown, Tensor) and type(shown) is not Tensor
            assert (shown.shape, shown.dtype) == (expected.shape, expected.dtype), name
            assert torch.equal(shown.dequantize(), expected), name
            assert torch.equal(shown + 1, expected + 1) and torch.equal(shown.abs(), expected.abs()), name
            assert torch.equal(shown.dequantize(torch.bfloat16), expected.bfloat16()), name


@EACH
def test_gradients_come_through_views(recipe: str) -> None:
    for shape in shapes_of(recipe):
        model, plain = pair(recipe, shape, keep_initial=False)
        plain.requires_grad_()
        for weight in (model.weight, plain):
            sum((view(weight) * (i + 1)).square().sum() for i, view in enumerate(VIEWS.values())).backward()
        assert type(model.weight.grad) is Tensor and torch.equal(model.weight.grad, plain.grad)


@EACH
@pytest.mark.parametrize("keep_initial", [True, False])
def test_writes_through_strided_views_raise_and_change_nothing(recipe: str, keep_initial: bool, device: str) -> None:
    for shape in shapes_of(recipe):
        model, _ = pair(recipe, shape, keep_initial, device)
        before = copy.deepcopy(model.weight)
        for name in STRIDED:
            for how, write in WRITES.items():
                with pytest.raises(NotImplementedError, match=r"weight: .*cannot change a quantized weight in place"):
                    write(VIEWS[name](model.weight.detach()))
                assert same_components(model.weight, before) and not model.weight.is_pending, (name, how)


@EACH
def test_experts_are_initialised_and_loaded_one_by_one(recipe: str, device: str) -> None:
    if has_tiles(recipe):
        pytest.skip("tiles are of matrices")
    for keep_initial in (True, False):
        model, plain = pair(recipe, EXPERTS, keep_initial, device)
        for weight in (model.weight, plain):
            torch.manual_seed(1)
            for expert in range(len(weight)):
                if keep_initial:
                    nn.init.xavier_uniform_(weight[expert])
                weight.data[expert].copy_(values(weight[expert].shape, expert))
        if not keep_initial and not RECIPES[recipe].scales_whole_tensor:  # whole rows of blocks are quantized at once
            assert not model.weight.is_pending
        finish_initialization(model)
        assert same_components(model.weight, QuantizedTensor.from_values(plain, RECIPES[recipe]))


@EACH
def test_views_follow_their_weight(recipe: str) -> None:
    model, _ = pair(recipe, MATRIX, keep_initial=False)
    views = {name: VIEWS[name](model.weight.detach()) for name in ("column", "row", "last columns")}
    for _ in range(2):
        model.weight.detach().copy_(values(MATRIX, 8))
        for name, view in views.items():
            assert torch.equal(view.dequantize(), VIEWS[name](model.weight.dequantize())), name
        finish_initialization(model)


def test_views_cannot_change_shapes_and_dtypes_of_weights() -> None:
    model, plain = pair("mxfp8")
    weight = model.weight.detach()
    for change in (
        lambda: weight.t_(), lambda: weight.unsqueeze_(0), lambda: weight.squeeze_(), lambda: weight.resize_(2, 2),
        lambda: weight.transpose_(0, 1), lambda: weight.set_(plain), lambda: weight[:, 3].unsqueeze_(0),
        lambda: torch.ones(3, out=weight[:, 3]),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"weight: .*cannot change a quantized weight in place"):
            change()
    with pytest.raises(TypeError, match=r"weight: .*torch\.int32"):
        weight.view(torch.int32)
    assert torch.equal(model.weight.initial_values(), plain) and not model.weight.is_pending


def test_compiled_code_writes_as_eager_code_or_raises() -> None:
    for keep_initial in (True, False):
        model, plain = pair("current", MATRIX, keep_initial)
        before = copy.deepcopy(model.weight)
        changes = [lambda weight: weight[:, 3].zero_(), lambda weight: weight[:, 3].copy_(torch.ones(128))]
        for change in (*changes, *([] if keep_initial else [lambda weight: weight.mul_(2.0)])):
            with pytest.raises(Exception, match=r"cannot change a quantized weight in place|mutation on a view chain"):
                torch.compile(change, backend="aot_eager")(model.weight.detach())
            assert not model.weight.is_pending and same_components(model.weight, before)
        torch.compile(lambda weight, new: weight.copy_(new), backend="aot_eager")(model.weight.detach(), 2.0 * plain)
        assert torch.equal(model.weight.values(), QuantizedTensor.from_values(2.0 * plain, RECIPES["current"]).values())
