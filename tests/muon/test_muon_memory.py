"""FusedMuon with states in host memory, and in CUDA graphs: the bits of usual steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from cases import EACH_FORMAT_AND_MASTER, FORMATS, MASTERS, Format, Master, values
from distributed import same_bits
from fused_optim.backends import offloaded
from fused_optim.quantized import Float8BlockScaling, quantize_model_
from fused_optim.state import host_states
from peers import FusedMuon

# Some are cut into parts in chunks of 32 kB; some have Gram matrices on GPUs, some plain steps.
SHAPES = [(64, 256), (272, 256), (6, 128), (3, 32, 64), (130, 384)]
VECTOR = (300,)


def make(device: str, fmt: Format, master: Master, **options: Any) -> FusedMuon:
    matrices = [nn.Parameter(values(shape, master.param_dtype, device, seed=i)) for i, shape in enumerate(SHAPES)]
    vector = nn.Parameter(values(VECTOR, master.param_dtype, device, seed=9))
    groups = [{"params": matrices}, {"params": [vector], "algorithm": "adamw", "lr": 1e-3}]
    return FusedMuon(groups, lr=0.01, experts=True, **{"state_dtype": fmt.dtype, **master.options, **options})


def give_gradients(optimizer: FusedMuon, step: int) -> None:
    for i, param in enumerate(optimizer.store.params):
        param.grad = values(tuple(param.shape), param.dtype, param.device.type, seed=100 * step + i)


def contents(optimizer: FusedMuon) -> list[Tensor]:
    found: list[Tensor] = []
    for param in optimizer.store.params:
        found += [param.detach().cpu(), *(state.cpu() for state in optimizer.state[param].values())]
        found.append(optimizer.store.layouts[param].scales.cpu())
    return found


# --- states in host memory --------------------------------------------------------------------------------------------


@pytest.fixture
def offloading() -> Iterator[None]:
    """Where there is no GPU, the CPU plays one."""
    with (
        mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")),
        mock.patch.object(offloaded, "CHUNK_BYTES", 1 << 15),
    ):
        yield


@EACH_FORMAT_AND_MASTER
def test_offloaded_states_give_the_same_bits(fmt: Format, master: Master, device: str, offloading: None) -> None:
    found = []
    for offload in (False, True):
        optimizer = make(device, fmt, master, offload_states=offload)
        for step in range(3):
            give_gradients(optimizer, step)
            optimizer.step()
        if offload:
            layouts = [optimizer.store.layouts[param] for param in optimizer.store.params]
            assert all(layout.offloaded for layout in layouts)
        found.append(contents(optimizer))
    assert all(map(same_bits, *found))


def test_offloaded_states_of_quantized_weights(device: str, offloading: None) -> None:
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 256, bias=False))
        quantize_model_(model.to(device, torch.bfloat16), Float8BlockScaling())
        optimizer = FusedMuon(model.parameters(), lr=0.01, state_dtype="int8", offload_states=offload)
        for step in range(3):
            for i, param in enumerate(model.parameters()):
                param.grad = values(tuple(param.shape), torch.bfloat16, device, seed=10 * step + i)
            optimizer.step()
        found.append([param.dequantize().cpu() for param in model.parameters()])
    assert all(map(same_bits, *found))


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def test_capturable_has_no_effect_on_the_cpu() -> None:
    found = []
    for capturable in (False, True):
        optimizer = make("cpu", FORMATS[0], MASTERS[0], capturable=capturable)
        give_gradients(optimizer, 0)
        optimizer.step()
        found.append(contents(optimizer))
    assert all(map(same_bits, *found))


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float32"])
def test_replays_equal_steps(fmt: Format, ns_dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = []
    for captured in (False, True):
        optimizer = make("cuda", fmt, MASTERS[-1], capturable=True, ns_dtype=ns_dtype)
        own = [torch.zeros_like(param) for param in optimizer.store.params]
        phase = torch.zeros((), device="cuda")

        def step(optimizer: FusedMuon = optimizer, own: list[Tensor] = own, phase: Tensor = phase) -> None:
            phase.add_(1.0)
            for param, grad in zip(optimizer.store.params, own, strict=True):
                grad.copy_(torch.sin(phase * (1.0 + param.detach().float().abs())))
                param.grad = grad
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        for _ in range(5):
            graph.replay() if captured else step()
        torch.cuda.synchronize()
        found.append(contents(optimizer))
    assert all(map(same_bits, *found))
