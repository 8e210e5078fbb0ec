"""Base of quantized weights and their views: torch's operations go to registered functions, or see decoded values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from fused_optim.quantized.recipes import Recipe

# What torch calls with a function of ``torch.ops`` and its arguments, which are whatever that function takes.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[OpOverload, Args, Kwargs], Any]
_Tensor = TypeVar("_Tensor", bound=Tensor)
_Made = TypeVar("_Made")
NO_RECIPE = cast(Recipe, None)  # of what is made by :func:`as_parameter`, and has its own


class Decodable(torch.Tensor):
    """Base of quantized weights and their views.

    ``handlers``: what a class implements itself. ``default_handler``: finds the function for any other operation.
    """

    handlers: ClassVar[dict[OpOverload, Handler]] = {}
    default_handler: ClassVar[Callable[[OpOverload], Handler]]

    # As torch's own subclasses have it; only its stubs know another signature.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype``, or of the tensor's own; wherever the data lies."""
        raise NotImplementedError

    @property
    def prefix(self) -> str:
        """The parameter's name, where it is known, as the beginning of a message."""
        raise NotImplementedError

    def __dlpack__(self, **options: Any) -> Any:
        return self.dequantize().__dlpack__(**options)

    @classmethod
    # Else what a graph break leaves to it would be compiled, handler by handler. As in torch.optim, and unlike
    # torch.compiler.disable, this imports the compiler only when it is called.
    @torch._disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]  # which torch's stubs take for a static method
        cls, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        handler = cls.handlers.get(func)
        return (Decodable.default_handler(func) if handler is None else handler)(func, args, kwargs or {})


def as_parameter(kind: type[_Tensor], given: object, requires_grad: bool) -> _Tensor:
    """A parameter, as ``nn.Parameter`` makes one: Accelerate calls the classes of parameters so, when it moves these.

    Raises TypeError for plain values, which say nothing of a recipe.
    """
    if not isinstance(given, kind):
        raise TypeError(
            "plain values in the place of a quantized weight, whose recipe they do not tell: load_state_dict, "
            "load_quantized_safetensors or from_pretrained within quantized_model_init load weights. Accelerate "
            "offloads quantized weights to the CPU, not to disk, and with keep_weights=True not at all"
        )
    return cast(_Tensor, torch.nn.Parameter(given, requires_grad))


def asked_by(package: str) -> bool:
    """True if a module of ``package`` calls the method that calls this.

    Of ``data_ptr()`` and ``untyped_storage()`` torch needs nothing, Accelerate an address, safetensors an error.
    """
    return bool(sys._getframe(2).f_globals.get("__name__", "").startswith(f"{package}."))


def view_of(source: Tensor, make: Callable[..., _Made], *args: Any) -> _Made:
    """``make(*args)``: no inference tensor where ``source`` is none, as torch counts the versions of both together."""
    if torch.is_inference_mode_enabled() and not source.is_inference():
        with torch.inference_mode(False):
            return make(*args)
    return make(*args)


def decoded(value: Any) -> Any:
    """Arguments with plain tensors in the places of quantized ones. torch's pytree would take longer than decoding."""
    if isinstance(value, Decodable):
        return value.dequantize()
    if type(value) in (list, tuple):
        return type(value)(map(decoded, value))
    if type(value) is dict:
        return {key: decoded(item) for key, item in value.items()}
    return value


def refuse(tensor: Decodable, what: object, why: str = "") -> NoReturn:
    """Raise NotImplementedError for a write that quantized weights do not take."""
    raise NotImplementedError(
        f"{tensor.prefix}{what} cannot change a quantized weight in place{why}. FusedAdam updates one, copy_(values) "
        "writes one, dequantize() gives a plain copy, dequantize_model_(model) plain weights, and a recipe with "
        "keep_weights=True weights that take any operation"
    )
