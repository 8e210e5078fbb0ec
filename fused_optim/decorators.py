"""Decorators of what training loops call."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGES = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))


def callers_level() -> int:
    """The ``stacklevel`` of a warning about the user's code: the first line outside of this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        level, frame = level + 1, frame.f_back
    return level


def between_graphs(function: F) -> F:
    """In a compiled training loop: run as it is, between two graphs. Traced, a step would become dozens of them.

    Where torch gives the caller up, as it does with some arguments, it would still trace what that calls.
    """
    untraced = torch._disable_dynamo(function)

    @functools.wraps(function)
    def untraced_or_not(*args: Any, **kwargs: Any) -> Any:
        is_watched = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
        return (untraced if is_watched else function)(*args, **kwargs)

    return cast(F, untraced_or_not)


def declared_without(*names: str) -> Callable[[F], F]:
    """A decorator: ``inspect.signature`` does not show these parameters.

    Where a step shows ``grad_scaler``, GradScaler passes itself and warns; where it shows ``**kwargs``, Megatron-FSDP
    cannot add parameters of its own.
    """

    def declare(function: F) -> F:
        signature = inspect.signature(function)
        shown = [parameter for name, parameter in signature.parameters.items() if name not in names]
        function.__dict__["__signature__"] = signature.replace(parameters=shown)
        return function

    return declare


def observed(step: F) -> F:
    """A decorator: torch's own of each ``step``, which runs hooks and shows it in profiles, where either is asked for.

    That one takes a tenth of the host's time. ``hooked`` says that it is there already. Compiled loops do not trace the
    step, except for a closure, which is the model's part: what else such a step does is between graphs itself.
    """
    with_hooks = Optimizer.profile_hook_step(step)

    def step_or_hooked(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        outermost = type(self).step
        if outermost is not observed_step and getattr(outermost, "hooked", False):  # which torch has decorated
            return step(self, *args, **kwargs)
        is_observed = torch.autograd._profiler_enabled() or bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
        return (with_hooks if is_observed else step)(self, *args, **kwargs)

    untraced = torch._disable_dynamo(step_or_hooked)

    @functools.wraps(step)
    def observed_step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        has_closure = (args[0] if args else kwargs.get("closure")) is not None
        is_watched = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
        return (untraced if is_watched and not has_closure else step_or_hooked)(self, *args, **kwargs)

    observed_step.__dict__["hooked"] = True
    return cast(F, observed_step)


def with_denormals(function: F) -> F:
    """A decorator: denormals count, in scalars as in elements, whatever ``torch.set_flush_denormal`` says here.

    That is a mode of the thread; those of the engines see to it themselves.
    """

    @functools.wraps(function)
    def function_with_denormals(*args: Any, **kwargs: Any) -> Any:
        if sys.float_info.min * 0.5 != 0.0:
            return function(*args, **kwargs)
        torch.set_flush_denormal(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(True)

    return cast(F, function_with_denormals)


def ungraded(function: F) -> F:
    """``torch.no_grad()`` as a decorator, without the objects that torch's makes at each call.

    And outside of inference mode: what is allocated in it can be written in no other.
    """

    @functools.wraps(function)
    def ungraded_function(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return cast(F, ungraded_function)


@overload
def entry(method: F) -> F: ...
@overload
def entry(*, idle: bool = True) -> Callable[[F], F]: ...
def entry(method: F | None = None, *, idle: bool = True) -> F | Callable[[F], F]:
    """A decorator of an optimizer's public methods: outside of compiled graphs, of autograd and of inference mode.

    ``idle``: refused in the middle of a step that gradient release makes. Methods that may be called then, or that
    refuse it in words of their own, say False.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def when_idle(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.stepper.check_idle(f"{method.__name__}()")
            return method(self, *args, **kwargs)

        return between_graphs(ungraded(cast(F, when_idle) if idle else method))

    return decorate if method is None else decorate(method)
