"""Tools around the optimizer, mostly behind ``python -m fused_optim``: they need no GPU and change no run."""
