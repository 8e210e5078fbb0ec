"""Adapters of the optimizer for quantized parameters: a module per library, named by ``fused_optim.adapters``."""
