"""Where tracked changes are tested: by the PyTorch reference, and by each engine."""

from __future__ import annotations

import pytest
import torch

BACKENDS = ["torch", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=BACKENDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("FUSED_OPTIM_BACKEND", "torch")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda" if request.param == "cuda" else "cpu"
