"""torchtitan's trainer where there is no GPU: `python -m titan_on_cpu` in place of `python -m torchtitan.train`.

It asks torch for the kind of device, reads the device's name and memory, divides gradients as gloo cannot, and has no
attention whose backward pass CPUs compute; these are replaced.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention


def attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, **others: Any) -> Any:
    """Of masks that are causal within a text: they are turned into what torch's plain attention takes."""
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    texts = torch.arange(q.shape[0])[:, None, None]
    mask = block_mask.mask_mod(texts, torch.tensor(0), rows, columns)[:, None]
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=others["enable_gqa"]), None


def divide_first(module: FSDPModule, factor: float) -> None:
    """FSDP2's factor, with sums that every backend knows."""
    _set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


_set_factor = FSDPModule.set_gradient_divide_factor


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.train import main as train

    nothing = metrics.DeviceMemStats(*[0 for _ in metrics.DeviceMemStats._fields])
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    utils.set_pg_timeouts = lambda **_: None  # whose barrier names a GPU
    FlexAttention._compiled_flex_attn = staticmethod(attention)
    FSDPModule.set_gradient_divide_factor = divide_first  # type: ignore[method-assign]
    train()


if __name__ == "__main__":
    main()
