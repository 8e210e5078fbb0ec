"""The interface of the compiled engines to Python: the functions and classes of ``csrc/multi_tensor/bindings``.

Tensors are passed as addresses, 0 for one that is not there; formats and types as the numbers that ``formats`` gives
them. ``where``: ``device`` and ``stream`` of the CUDA engine, ``threads`` of the CPU engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fused_optim.formats.elements import Element
from fused_optim.memory.by_parameter import Reference

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class CachedShard(NamedTuple):
    """The objects by which an engine notices that a shard has changed; the fields of ``cached_shard.h``."""

    param_ref: Reference  # others may let go of it at any time
    state_tensors: tuple[Tensor | None, ...]  # of the rule's states, in order
    master: Tensor | None
    spec: DTensorSpec | None  # the parameter's
    states: dict[str, Tensor]  # where the tensors beside the parameter were found
    # Of a quantized weight that an engine can compare:
    local_ref: Reference | None = None  # the parameter's local tensor, which may be itself
    components: Mapping[str, Tensor] | None = None  # that one's
    names: tuple[str, ...] = ()  # of what is written of it in `components`: codes and scales first
    parts: tuple[Tensor, ...] = ()  # these themselves
    master_local: Tensor | None = None


class EngineNumbers(Protocol):
    """Addresses or sizes, kept in C++: the other functions take them where they take lists."""

    def tolist(self) -> list[int]: ...


class EngineTensorReader(Protocol):
    """Reads torch's tensors of one device; see ``tensor_reader.h``."""

    @property
    def reads_directly(self) -> bool: ...
    def unusual(self, tensors: Sequence[Tensor]) -> list[int]: ...
    def addresses(self, tensors: list[Tensor | None]) -> EngineNumbers | None: ...


class EngineShardTable(Protocol):
    """The shards of one device and their param groups, step by step; see ``shard_table.h``."""

    def refresh(self, cached: list[CachedShard], attribute: str) -> list[int]: ...
    def cache(self, shard: int, cached: CachedShard) -> bool: ...
    def written(self) -> list[int]: ...
    def find_written(self, cached: list[CachedShard]) -> list[int]: ...
    def sharing(self) -> list[int]: ...
    def with_gradients(self) -> list[int]: ...
    def updated(self, cached: list[CachedShard]) -> list[Tensor]: ...
    def mark(self, cached: list[CachedShard]) -> None: ...
    def groups_with_gradients(self) -> list[int]: ...
    def set_shard(self, shard: int, work: object) -> None: ...  # a ShardWork
    def set_group(
        self,
        group: int,
        lr: float,
        weight_decay: float,
        values: list[float],
        step: int,
        decoupled: bool,
        maximize: bool,
        stochastic_rounding: bool,
        lr_pointer: int = 0,
        grad_scale: int = 0,
        grad_factor: int = 0,
        found_inf: int = 0,
        step_pointer: int = 0,
    ) -> None: ...
    def launch(self, **where: int) -> None: ...
    def launch_matrix_pass(
        self, first: bool, shards: list[int], values: list[int], types: Sequence[int], **where: int
    ) -> None: ...


class EngineMarkedRows(Protocol):
    """Tensors and their bits, by address: bits, elements, values, index of the first element, bytes of one."""


class EngineGradients(Protocol):
    """Local gradients of one device, each in a group."""

    def norm(
        self, *, infinity: bool, group_count: int, max_norm: float, sums: int, result: int, **where: int
    ) -> None: ...
    def scale(self, *, factor: int, **where: int) -> None: ...


class Engine(Protocol):
    """The module of an engine."""

    @property
    def CHANGES_PER_UNIT(self) -> int: ...

    def TensorReader(
        self,
        exchange_api: object,
        tensor_type: type,
        keys: list[tuple[Tensor, int]],
        examples: list[tuple[Tensor, int, int, int]],
        copied: list[tuple[Tensor, int, int, int]],
        checks_ends: bool = False,
    ) -> EngineTensorReader: ...
    def Numbers(self, values: list[int]) -> EngineNumbers: ...
    def same_objects(self, left: list[Any], right: list[Any]) -> bool: ...
    def are_objects(self, list: list[Any], ids: EngineNumbers) -> bool: ...
    def are_items(self, dict: dict[Any, Any], keys: EngineNumbers, values: EngineNumbers) -> bool: ...
    def ShardTable(
        self,
        rule: int,
        state_names: Sequence[str],
        groups: list[int],
        group_count: int,
        reader: EngineTensorReader,
        state_reader: EngineTensorReader,
        element_types: dict[torch.dtype, Element],
        dtensor_type: type,
    ) -> EngineShardTable: ...
    def Gradients(
        self, *, addresses: list[int], numels: list[int], types: list[int], groups: list[int]
    ) -> EngineGradients: ...
    def writes_weights(self, rule: int, state_formats: Sequence[int]) -> bool: ...
    def quantize_absmax(self, *, addresses: list[int], numels: list[int], result: int, **where: int) -> None: ...
    def quantize_rescale(
        self,
        *,
        scales: EngineNumbers | list[int],
        histories: EngineNumbers | list[int],
        absmaxes: EngineNumbers | list[int],
        largest: float,
        factor: float,
        history: int,
        most_recent: bool,
        stage: int,
        applies: int,
        **where: int,
    ) -> None: ...
    def quantize_encode(
        self,
        *,
        values: EngineNumbers | list[int],
        data: EngineNumbers | list[int],
        scales: EngineNumbers | list[int],
        tensor_scales: EngineNumbers | list[int],
        rows: EngineNumbers | list[int],
        columns: EngineNumbers | list[int],
        roundings: Sequence[tuple[int, ...]],
        format: int,
        round_up: bool,
        **where: int,
    ) -> None: ...
    def cast_tensor(
        self,
        *,
        values: int,
        codes: int,
        transposed: int,
        scale: int,
        absmax: int,
        rows: int,
        columns: int,
        half: bool,
        format: int,
        measured: bool,
        **where: int,
    ) -> None: ...
    def cast_delayed(
        self,
        *,
        values: int,
        codes: int,
        transposed: int,
        scale: int,
        absmax: int,
        history: int,
        remembered: int,
        rows: int,
        columns: int,
        half: bool,
        format: int,
        **where: int,
    ) -> None: ...
    def cast_rows(
        self,
        *,
        values: int,
        codes: int,
        scale: int,
        transposed: int,
        transposed_scale: int,
        absmax: int,
        rows: int,
        columns: int,
        half: bool,
        format: int,
        **where: int,
    ) -> None: ...
    def cast_blocks(
        self,
        *,
        values: int,
        codes: int,
        scale: int,
        transposed: int,
        transposed_scale: int,
        rows: int,
        columns: int,
        half: bool,
        power_of_two: bool,
        tiles: bool,
        format: int,
        **where: int,
    ) -> None: ...
    def transpose(self, *, codes: int, transposed: int, rows: int, columns: int, **where: int) -> None: ...
    def MarkedRows(self, rows: Sequence[tuple[int, ...]]) -> EngineMarkedRows: ...
    def count_changed(self, *, rows: EngineMarkedRows, places: int, **where: int) -> list[int]: ...
    def collect_changed(
        self, *, rows: EngineMarkedRows, targets: Sequence[tuple[int, int]], places: int, **where: int
    ) -> None: ...
    def quantize_decode(self, *, weight: tuple[int, ...], format: int, type: int, **where: int) -> None: ...


class CpuEngine(Engine, Protocol):
    """The compiled CPU engine: the functions that it has beside all engines' own."""

    def decode_state(
        self, *, bits: int, scale: int, values: int, numel: int, block: int, format: int, square: bool
    ) -> None: ...
    def can_fold_crc32(self) -> bool: ...
    def crc32(self, content: object, crc: int) -> int: ...
    def crc32_of_file(self, descriptor: int, start: int, size: int) -> tuple[int, int]: ...
    def join_remainder(self, *, high: int, low: int, values: int, numel: int, bits: int) -> None: ...


class CudaEngine(Engine, Protocol):
    """Functions of the CUDA engine alone."""

    @property
    def NORM_SUMS(self) -> int: ...

    def load_kernels(self, rule: int, device: int) -> None: ...
    def cuda_versions(self) -> tuple[int, int]:
        """Versions of the CUDA runtime, and of the newest that the driver runs: 13000 for 13.0, 0 without a driver."""

    def mark_differences(self, rows: list[tuple[int, int, int, int, int]], *, device: int, stream: int) -> None: ...
    def has_products(self, device: int) -> bool: ...
    def matrix_products(self, products: list[tuple[int | float, ...]], **where: int) -> None: ...
    def normalize(
        self,
        *,
        values: list[int],
        result: int,
        sums: int,
        numel: int,
        factor: float,
        least: float,
        type: int,
        **where: int,
    ) -> None: ...
    def norm_workspace_bytes(self, device: int) -> int: ...
