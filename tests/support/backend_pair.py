"""Two equal optimizers, one for the ``torch`` backend and one for a compiled engine, whose steps are compared.

On GPUs division is not IEEE's, so the update itself may differ by 2 units in the last place; what is stored of it is
compared with that margin there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cases import Master, Shape, values
from fused_optim.formats.masters import join_remainder
from peers import FusedAdam

UseBackend = Callable[[str], None]


def parameters(shapes: list[Shape], master: Master, device: str) -> list[Tensor]:
    return [
        torch.nn.Parameter(shape.layout(values(shape.shape, master.param_dtype, device, seed=i)))
        for i, shape in enumerate(shapes)
    ]


def one_group(shapes: list[Shape], master: Master, device: str) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [{"params": parameters(shapes, master, device)}]


class Pair:
    """Two equal optimizers: one for the ``torch`` backend, one for the compiled engine of the device."""

    def __init__(
        self, make: Callable[[], list[dict[str, Any]]], engine: str, use_backend: UseBackend, **options: Any
    ) -> None:
        self.engine, self.use_backend = engine, use_backend
        options = {
            "lr": 0.01,
            "weight_decay": 0.1,
            "decoupled_weight_decay": True,
            "use_decoupled_grad": True,
            **options,
        }
        self.reference, self.compiled = FusedAdam(make(), **options), FusedAdam(make(), **options)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One step of both from the same state, compared."""
        before = [master_of(self.reference, p) for p in self.reference.store.params]
        for optimizer, backend in ((self.reference, "torch"), (self.compiled, self.engine)):
            for param, grad in zip(optimizer.store.params, grads, strict=True):
                param.decoupled_grad = grad
            self.use_backend(backend)
            optimizer.step()
        for a, b, old in zip(self.reference.store.params, self.compiled.store.params, before, strict=True):
            self._compare(a, b, old)

    def _compare(self, a: Tensor, b: Tensor, old: Tensor) -> None:
        expected, actual = self.reference.state[a], self.compiled.state[b]
        for name in ("exp_avg", "exp_avg_sq"):
            poisoned = self.reference.get_unscaled_state(a, name).isnan()  # codes mean nothing there
            assert torch.equal(self.compiled.get_unscaled_state(b, name).isnan(), poisoned)
            assert_same_bits(actual[name].masked_fill(poisoned, 0), expected[name].masked_fill(poisoned, 0), name)
        for optimizer, param in ((self.reference, a), (self.compiled, b)):
            if optimizer.store.layouts[param].format("master_param").scaled:
                assert_same_bits(param, master_of(optimizer, param).to(param.dtype), "rounded master")
        scales = [
            optimizer.store.layouts[param].scale for optimizer, param in ((self.compiled, b), (self.reference, a))
        ]
        for name in ("exp_avg", "exp_avg_sq") if self.engine == "cuda" else ("exp_avg", "exp_avg_sq", "master_param"):
            actual_scale, expected_scale = (scale(name) for scale in scales)
            assert (actual_scale is None) == (expected_scale is None)
            if actual_scale is not None and expected_scale is not None:
                assert_same_bits(actual_scale, expected_scale, f"scales of {name}")
        if self.engine != "cuda":
            assert_same_bits(b, a, "param")
            if "master_param" in expected:
                assert_same_bits(actual["master_param"], expected["master_param"], "master_param")
            return
        assert_near(master_of(self.compiled, b), master_of(self.reference, a), old, kept_bits(a, expected))
        with torch.no_grad():  # the next step starts from the same bits again
            b.copy_(a)
            if "master_param" in expected:
                actual["master_param"].copy_(expected["master_param"])
            self.compiled.store.layouts[b].scales.copy_(self.reference.store.layouts[a].scales)


def master_of(optimizer: FusedAdam, param: Tensor) -> Tensor:
    """The best value that is known of a parameter, in FP32."""
    master = optimizer.state.get(param, {}).get("master_param")
    if master is None:
        return param.detach().float().clone()
    if master.dtype == torch.float16:
        return optimizer.get_unscaled_state(param, "master_param")
    return master.clone() if master.dtype == torch.float32 else join_remainder(param.detach(), master)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bits, except that any NaN equals any NaN."""
    actual, expected = actual.detach().contiguous(), expected.detach().contiguous()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    same = (actual == expected) & (actual.signbit() == expected.signbit())
    different = int((~same & ~((actual != actual) & (expected != expected))).sum())
    assert different == 0, f"{what}: {different} of {same.numel()} differ"


def kept_bits(param: Tensor, states: dict[str, Tensor]) -> int:
    """Significant bits of what is stored of the update."""
    master = states.get("master_param", param)
    return {torch.bfloat16: 8, torch.float16: 11, torch.int8: 16}.get(master.dtype, 24)


def assert_near(actual: Tensor, expected: Tensor, old: Tensor, bits: int) -> None:
    """Within 2 units in the last FP32 place of the larger of value and update; of less precise values, 1 unit more."""
    a, b, before = (x.detach().double() for x in (actual, expected, old))
    largest = torch.fmax(b.abs(), (b - before).abs()).float()
    margin = 2 * (torch.nextafter(largest, torch.tensor(torch.inf, device=largest.device)) - largest).double()
    if bits < 24:
        margin += (b.abs() * 2.0 ** (1 - bits)).clamp_min(2.0**-24)
    near = (a - b).abs() <= margin
    assert bool((near | (a == b) | (a.isnan() & b.isnan())).all())


def gradients(params: list[Tensor], dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    return [values(tuple(p.shape), dtype, device, seed=100 * seed + i, spread=2.0) for i, p in enumerate(params)]
