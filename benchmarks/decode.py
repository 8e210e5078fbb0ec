"""Time of the GPU for decoding a 4096 x 4096 weight of each recipe to BF16: ``python benchmarks/decode.py``."""

from __future__ import annotations

import torch

from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
)

CALLS = 50


def microseconds(weight: QuantizedTensor) -> float:
    """Of one call, within a CUDA graph: without the host."""
    weight.dequantize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            weight.dequantize()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / CALLS


def main() -> None:
    values = torch.randn(4096, 4096, device="cuda").bfloat16()
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling(), Float8BlockScaling(), NVFP4BlockScaling()):
        print(f"{recipe.name} {microseconds(QuantizedTensor.from_values(values, recipe)):.1f} us")


if __name__ == "__main__":
    main()
