"""Dispatch of torch's operations on quantized tensors: to registered handlers, or to decoded values."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from fused_optim.quantized.recipes import Recipe

# What torch calls with a function of ``torch.ops`` and its arguments, which are whatever that function takes.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[OpOverload, Args, Kwargs], Any]
_Tensor = TypeVar("_Tensor", bound=Tensor)
NO_RECIPE = cast(Recipe, None)  # of what is made by :func:`as_parameter`, and has its own


class OperatorKind(enum.Enum):
    """Kinds of functions without a handler of their own."""

    VIEW = enum.auto()  # gives views of its argument
    MUTABLE = enum.auto()  # writes into its arguments


class Decodable(torch.Tensor):
    """Base of quantized weights and their views: most of torch's operations see them as decoded plain tensors."""

    # Of functions whose first tensors of this kind are of this class; here of all that have no handler of their own.
    handlers: ClassVar[dict[OpOverload | OperatorKind, Handler]] = {}

    # As torch's own subclasses have it; only its stubs know another signature.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype``, or of the tensor's own; wherever the data lies."""
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
        return (_default_handler(func) if handler is None else handler)(func, args, kwargs or {})


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
    """True if a module of ``package`` calls the method that calls this."""
    return bool(sys._getframe(2).f_globals.get("__name__", "").startswith(f"{package}."))


Made = TypeVar("Made")


def view_of(source: Tensor, make: Callable[..., Made], *args: Any) -> Made:
    """``make(*args)``: no inference tensor where ``source`` is none, as torch counts the versions of both together."""
    if torch.is_inference_mode_enabled() and not source.is_inference():
        with torch.inference_mode(False):
            return make(*args)
    return make(*args)


_DEEPEST = 12  # calls between a function of torch and the handler of what it does, wrappers included


def called_by(function: Callable[..., Any]) -> bool:
    """True if ``function`` is on the stack, recognised by its code: it may be called under another name."""
    code = inspect.unwrap(function).__code__
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


# --- operations -------------------------------------------------------------------------------------------------


def decoded(value: Any) -> Any:
    """Arguments with plain tensors in the places of quantized ones. torch's pytree would take longer than decoding."""
    if isinstance(value, Decodable):
        return value.dequantize()
    if type(value) in (list, tuple):
        return type(value)(map(decoded, value))
    if type(value) is dict:
        return {key: decoded(item) for key, item in value.items()}
    return value


@functools.cache
def _default_handler(func: OpOverload) -> Handler:
    if func.namespace == "c10d":  # these write into their arguments, but their schemas do not say so
        return _refuse
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return _decompose
    if func._schema.is_mutable:
        return Decodable.handlers[OperatorKind.MUTABLE]
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    return Decodable.handlers[OperatorKind.VIEW] if is_view else call_decoded


def call_default(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Call the default handler of a function's kind."""
    return _default_handler(func)(func, args, kwargs)


def _refuse(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    raise RuntimeError(f"{func} takes no quantized weights; dequantize() gives a plain copy")


def _decompose(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Call a function through others, as autograd does; without autograd, as in inference mode, this does it."""
    return func.decompose(*args, **kwargs)


def call_decoded(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    return func(*decoded(args), **decoded(kwargs))
