"""For mypy alone: the modules that ``adapters.py`` imports by name have the functions of its protocol."""

from fused_optim.adapters import Adapter
from fused_optim.quantized.adapters import others, update

ADAPTERS: tuple[Adapter, ...] = (others, update)
