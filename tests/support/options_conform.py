"""For mypy alone: options are known by name and type, in the classes that pass them on, too."""

import torch

from fused_optim import FusedAdam, FusedAdamW
from fused_optim.compat import apex, transformer_engine

PARAMS = [torch.zeros(1)]

FusedAdam(PARAMS, lr=1e-3, exp_avg_dtype="int8", master_bits=0)
FusedAdamW(PARAMS, lr=1e-3, exp_avg_dtype="int8", master_bits=0, fused=True)
apex.FusedAdam(PARAMS, 1e-3, True, exp_avg_dtype=torch.int8, seed=3)
transformer_engine.FusedAdam(PARAMS, exp_avg_dtype=torch.int8, seed=3)

FusedAdam(PARAMS, exp_avg_dtyp=1)  # type: ignore[call-arg]
FusedAdamW(PARAMS, exp_avg_dtyp=1)  # type: ignore[call-arg]
FusedAdamW(PARAMS, seed="text")  # type: ignore[arg-type]
apex.FusedAdam(PARAMS, exp_avg_dtyp=1)  # type: ignore[call-arg]
transformer_engine.FusedAdam(PARAMS, exp_avg_dtyp=1)  # type: ignore[call-arg]
