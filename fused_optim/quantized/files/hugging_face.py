"""Models with quantized weights in Hugging Face's own ways to save: ``save_pretrained``, Trainer and Accelerate."""

from __future__ import annotations

import functools
import os
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import nn

from fused_optim.quantized.files.export import save_quantized_safetensors
from fused_optim.quantized.model import decoded_state_dict
from fused_optim.quantized.tensor import QuantizedTensor
from fused_optim.sharding.collective import world_size

Form = Literal["plain", "compressed-tensors", "fp8"]


@runtime_checkable
class Pretrained(Protocol):
    """The part of a transformers model that is used here."""

    config: Any

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write the configuration and the weights."""


def save_pretrained_as(model: nn.Module, form: Form = "plain") -> None:
    """Let ``model.save_pretrained``, which Trainer calls for its checkpoints, write quantized weights.

    Args:
        model: of transformers. What is wrapped around it calls its method.
        form: ``"plain"``: decoded values, in the weights' dtype, which any program loads. Trainer resumes from them,
            and the optimizer's masters write the weights then, bit for bit. Or a layout of
            :func:`save_quantized_safetensors`, with the model's configurations; Trainer cannot resume from it.

    Raises:
        TypeError: for what is no model of transformers.
        ValueError: for another form. ``model.save_pretrained`` raises it, in a layout, for a state dict and further
            options, and RuntimeError on several ranks, which have to write a layout together.
    """
    if not isinstance(model, Pretrained):
        raise TypeError(f"model: expected a model of transformers, with save_pretrained, got a {type(model).__name__}")
    if form not in get_args(Form):
        raise ValueError(f"form: expected one of {', '.join(map(repr, get_args(Form)))}, got {form!r}")
    save = _save_plain if form == "plain" else functools.partial(_save_quantized, form)
    vars(model)["save_pretrained"] = functools.partial(save, model)


def write_plain_weights(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
    """Write decoded values with ``save_state``: a hook for ``accelerator.register_save_state_pre_hook``.

    When the state is loaded, the optimizer's masters write the weights, bit for bit.
    """
    for state in weights:
        for name, value in decoded_state_dict(state).items():
            if isinstance(state[name], QuantizedTensor):
                state[name] = value.clone()  # tied ones are expected under all names, as these do not look tied


def _save_plain(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    state = decoded_state_dict(model.state_dict() if state_dict is None else state_dict)
    type(model).save_pretrained(model, save_directory, is_main_process=is_main_process, state_dict=state, **options)


def _save_quantized(
    form: Literal["compressed-tensors", "fp8"],
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    wrong = ["state_dict"] * (state_dict is not None) + sorted(options)
    if wrong:
        raise ValueError(
            f"save_pretrained in layout {form!r} takes no {', '.join(wrong)}: it writes the model's weights"
        )
    if world_size() > 1:
        raise RuntimeError(
            f"save_pretrained in layout {form!r} on one of several ranks: call save_quantized_safetensors(model, "
            f"{str(save_directory)!r}, {form!r}) on all"
        )
    if not is_main_process:
        return
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(save_directory)
    if model.can_generate():
        model.generation_config.save_pretrained(save_directory)
    save_quantized_safetensors(model, save_directory, form)
