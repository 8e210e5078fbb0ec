"""The compiled engines: hands raw addresses, sizes and formats of one device's shards to C++."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from fused_optim.backends import GroupWork, Hyper, ShardWork, load_engine
from fused_optim.formats import ELEMENT_TYPES


def _add_group(step: Any, hyper: Hyper, lr: torch.Tensor | None) -> None:
    step.add_group(
        lr=0.0 if lr is not None else hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        step=hyper.step,
        adam_w=hyper.adam_w,
        bias_correction=hyper.bias_correction,
        maximize=hyper.maximize,
        stochastic_rounding=hyper.stochastic_rounding,
        lr_pointer=0 if lr is None else lr.data_ptr(),
    )


def _add_shard(step: Any, work: ShardWork) -> None:
    slots, geometry = work.slots, work.slots.geometry
    step.add_shard(
        grad=work.grad.data_ptr(),
        param=work.param.data_ptr(),
        master=0 if work.master is None else work.master.data_ptr(),
        exp_avg=work.exp_avg.data_ptr(),
        exp_avg_sq=work.exp_avg_sq.data_ptr(),
        scales=slots.scales.data_ptr(),
        numel=geometry.numel,
        offset=geometry.offset,
        inner_local=geometry.inner_local,
        inner_global=geometry.inner_global,
        key=work.key,
        grad_type=ELEMENT_TYPES[work.grad.dtype],
        param_type=ELEMENT_TYPES[work.param.dtype],
        master_kind=int(slots.master),
        exp_avg_format=slots.exp_avg.code,
        exp_avg_sq_format=slots.exp_avg_sq.code,
        block_log2=(geometry.block or 128).bit_length() - 1,
    )


def run(backend: str, device: torch.device, groups: list[GroupWork]) -> None:
    """Run one step over the shards of ``device``; on CUDA it is enqueued on the current stream."""
    engine: ModuleType | None = load_engine(backend)[0]
    assert engine is not None
    step = engine.Step()
    on_device = []  # converted learning rates must outlive the launch
    for group in groups:
        lr = group.hyper.lr
        tensor = lr.to(device=device, dtype=torch.float32) if isinstance(lr, torch.Tensor) else None
        on_device.append(tensor)
        _add_group(step, group.hyper, tensor)
        for work in group.shards:
            if work.slots.geometry.numel:
                _add_shard(step, work)
    if backend == "cuda":
        step.launch(device=device.index, stream=torch.cuda.current_stream(device).cuda_stream)
    else:
        step.launch(threads=torch.get_num_threads())
