"""How the optimizer speaks to quantized parameters: a module per library, as ``fused_optim.adapters`` names them."""
