"""How the optimizer speaks to quantized parameters: one module per kind of tensor, imported when one is met.

Such a module, in ``quantized/adapters/``, has the functions of :class:`Adapter`. To add a kind of another library, name
its type here: ``others`` asks for ``dequantize()``, and for ``quantize_`` or ``copy_``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import MASK32
from fused_optim.formats.rounding import GOLDEN_RATIO, rounding_bits
from fused_optim.sharding.dtensor import Geometry, local_tensor

# Qualified names of tensor types (their subclasses are meant, too), and the modules that know them, of this package.
PACKAGE = "fused_optim.quantized.adapters"
ADAPTERS = {
    "fused_optim.quantized.tensor.quantized_tensor.QuantizedTensor": "update",
    "transformer_engine.pytorch.quantized_tensor.QuantizedTensor": "others",
    "transformer_engine.pytorch.tensor.quantized_tensor.QuantizedTensor": "others",
    "torchao.prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight": "others",
}
COMPARED = 2**26  # elements of parameters and masters that are compared at a time


@dataclass(frozen=True)
class Fractions:
    """The rounding fractions of a local shard in a step. ``step``: its number, a tensor where the device counts."""

    key: int
    geometry: Geometry
    step: int | Tensor

    def tensor(self, device: torch.device) -> Tensor:
        """One fraction per element; see ``formats.rounding_bits``."""
        offset = self.step * GOLDEN_RATIO & MASK32
        return rounding_bits(self.key, self.geometry.global_indices(device), offset)


@dataclass(frozen=True)
class FusedEncode:
    """The outputs of an update of an FP32 master for the quantized weight beside it, in the same pass.

    ``format``, ``round_up``: as in ``recipes.KernelFormat``. ``data``: the codes are written here; None: they are
    written later. ``scale``: that of the blocks, which is written too, or of the whole weight, which is read; None
    without ``data``. ``measures``: the absmax of the new values is wanted. ``names``: of all that is written of the
    weight, ``data`` and ``scale`` first, in the local tensor's dict ``components``, which is given too: an engine can
    look whether it is still there.
    """

    format: int
    round_up: bool
    data: Tensor | None
    scale: Tensor | None
    measures: bool
    names: tuple[str, ...]
    components: dict[str, Tensor]


@dataclass(frozen=True)
class Update:
    """New local FP32 values of a parameter, or None where it stays as it is and only takes part in reductions.

    ``fractions``: None to round to nearest; else the parameter has no master, which is so on all ranks. ``absmax``: the
    largest finite magnitude of the values, shape ``(1,)``, where the update pass has measured it. ``written``: the pass
    has written the codes, too.
    """

    param: Tensor
    values: Tensor | None
    fractions: Fractions | None = None
    absmax: Tensor | None = None
    written: bool = False


@dataclass(frozen=True)
class Place:
    """The place of a local shard's tensor in that of the whole parameter, which has this ``shape``."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Adapter(Protocol):
    """The optimizer's view of a quantized parameter: its local tensor, and the parameter (perhaps a DTensor) itself."""

    def needs_master(self, param: Tensor) -> str | None:
        """Why small updates of this parameter would be lost without a master; None if :meth:`write` keeps them.

        All ranks answer alike.
        """

    def retain_initial(self, param: Tensor) -> None:
        """An optimizer holds this parameter: :meth:`initial_values` are wanted until :meth:`discard_initial`."""

    def has_initial(self, param: Tensor) -> bool:
        """True if it remembers more than :meth:`values`, which no file holds."""

    def initial_values(self, param: Tensor) -> Tensor:
        """New local FP32 values to start a master from, as precise as the tensor remembers them."""

    def discard_initial(self, param: Tensor) -> None:
        """Free what was only kept for :meth:`initial_values`."""

    def values(self, local: Tensor) -> Tensor:
        """The decoded values: a new FP32 tensor."""

    def codes(self, local: Tensor) -> Tensor | None:
        """The tensor that holds the codes. Where another one does, or in other memory, someone has written the weight.

        Not the weight itself, which has no memory of its own: what it says of that may differ each time it is asked.
        None if it is without codes.
        """

    def is_master(self, param: Tensor, master: Tensor, written: Tensor) -> Tensor:
        """Elementwise, whether a parameter still is its rounded master: no more than half a step away from it.

        ``written``: its :meth:`initial_values`. Steps are those of the scales that it has, or had before plain values
        were written. A master that these scales can only saturate is another value.
        """

    def keeps(self, param: Tensor, master: Tensor) -> bool:
        """True if a parameter beside which its master is loaded stays as it is, because it is the master rounded with a
        scale that checkpoints do not have. Rounded again, with another scale, it would move away from what was saved.
        """

    def parts(self, param: Tensor) -> dict[str, Tensor] | None:
        """Tensors that decode this rank's shard, by name: ``data`` first, then scales. None: the adapter cannot tell.

        No copies.
        """

    def place(self, param: Tensor, part: str) -> Place:
        """The place of one of :meth:`parts`."""

    def needs_collective(self, param: Tensor) -> bool:
        """True if new values need a reduction over ranks. All ranks answer alike."""

    def target(self, param: Tensor) -> FusedEncode | None:
        """The encoding that the update pass can do for this parameter; None: :meth:`write` does it all."""

    def write(self, updates: Sequence[Update], applies: Tensor | None, advance: bool) -> None:
        """Quantize many.

        All ranks pass the same parameters, in the same order, that need a collective.

        ``applies``: a boolean scalar; where False, scales and histories stay as they are. None means True.
        ``advance``: False if the values are those of the last update again, so that no history moves on.
        """

    def batch(self, updates: Sequence[Update]) -> Batch:
        """These updates for one step, or for several."""


class Batch(Protocol):
    """Updates that are made in one step, or in several as long as they and their parameters are the same objects.

    ``lasts``: it may serve several, since it does not keep the parameters.
    """

    lasts: bool

    def prepare(self, applies: Tensor | None) -> None:
        """Before the pass that makes these updates: scales of earlier values; see :meth:`Adapter.write`."""

    def write(self, applies: Tensor | None) -> None:
        """See :meth:`Adapter.write`."""


def adapter_of(param: Tensor) -> Adapter | None:
    """The adapter for a parameter; None if it is not quantized."""
    return _adapter_of_type(type(local_tensor(param)))


@functools.cache
def _adapter_of_type(kind: type) -> Adapter | None:
    for base in kind.__mro__:
        module = ADAPTERS.get(f"{base.__module__}.{base.__qualname__}")
        if module is not None:
            return cast(Adapter, importlib.import_module(f"{PACKAGE}.{module}"))
    return None


def equal_or_nan(x: Tensor, other: Tensor) -> Tensor:
    """Elementwise; NaN is NaN."""
    return (x == other) | (x.isnan() & other.isnan())


def retain_initial_values(params: Iterable[Tensor]) -> None:
    """Tell quantized parameters that an optimizer holds them."""
    for param in params:
        adapter = adapter_of(param)
        if adapter is not None:
            adapter.retain_initial(param)


def needs_collective(param: Tensor) -> bool:
    """True if a parameter is quantized and new values of it need a reduction over ranks."""
    adapter = adapter_of(param)
    return adapter is not None and adapter.needs_collective(param)


def _by_adapter(updates: Sequence[Update]) -> dict[Adapter, list[Update]]:
    found: dict[Adapter, list[Update]] = {}
    for update in updates:
        adapter = adapter_of(update.param)
        assert adapter is not None
        found.setdefault(adapter, []).append(update)
    return found


def batches(updates: Sequence[Update]) -> list[Batch]:
    """The updates by adapter."""
    return [adapter.batch(alike) for adapter, alike in _by_adapter(updates).items()]


def write_loaded(updates: Sequence[Update]) -> None:
    """Quantize parameters whose masters were loaded, but for those that stay; see :meth:`Adapter.keeps`.

    All ranks pass the same parameters, in the same order, that need a collective.
    """
    for adapter, alike in _by_adapter(updates).items():
        new = [each for each in alike if each.values is None or not adapter.keeps(each.param, each.values)]
        adapter.write(new, None, False)


def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    """Quantize the parameters of all adapters; see :meth:`Adapter.write`."""
    for adapter, alike in _by_adapter(updates).items():
        adapter.write(alike, applies, advance)
