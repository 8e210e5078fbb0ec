"""What the tests of quantized weights share: recipes, models, given gradients, the components of all ranks joined."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distributed
from distributed import Part, part, shard_like
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from fused_optim.sharding.dtensor import local_tensor
from peers import FusedAdam

RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "delayed": Float8DelayedScaling(amax_history_len=3),
    "recent": Float8DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1),
    "tiles": Float8BlockScaling((128, 128)),
    "rows": Float8BlockScaling((1, 128), power_of_two=True),
    "mxfp8": MXFP8BlockScaling(round_up=False),
    "mxfp8up": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
Case = str | Recipe  # the name of a row, or a recipe that has none
WHOLE = [name for name, recipe in RECIPES.items() if recipe.scales_whole_tensor]
# Rows and columns. Uneven shards, empty ones (on 2 ranks, too), short blocks. Cuts go between tiles of 128 rows (of 512
# rows on 2 and 4 ranks) and through them.
SHAPES = {"even": (24, 64), "uneven": (7, 144), "few": (1, 48), "never": (5, 32), "frozen": (3, 32)}
TILED_SHAPES = {"even": (512, 20), "uneven": (391, 144), "few": (1, 48), "never": (200, 8), "frozen": (135, 130)}


def recipe_of(case: Case) -> Recipe:
    return RECIPES[case] if isinstance(case, str) else case


def has_tiles(case: Case) -> bool:
    """Whether blocks go over several rows, so that not every shard can be cut."""
    return any(part.tile is not None and part.tile[0] > 1 for part in recipe_of(case).components)


def values(shape: Iterable[int], *seed: int) -> Tensor:
    """Normal values over several magnitudes, the same on every rank, on this rank's device."""
    generator = torch.Generator().manual_seed(hash(seed))
    options = {"generator": generator, "device": "cpu"}  # also while models are built on the meta device
    shape = tuple(shape)
    found = torch.randn(shape, **options) * torch.exp2(torch.randint(-9, 2, shape, **options))
    return found.to(distributed.device())


class Layers(nn.Module):
    """Linear layers of every shape, side by side; every other one has a bias, which stays plain."""

    def __init__(self, shapes: dict[str, tuple[int, int]], dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        for index, (name, (rows, columns)) in enumerate(shapes.items()):
            layer = nn.Linear(columns, rows, bias=index % 2 == 0, dtype=dtype)
            for number, param in enumerate(layer.parameters()):
                param.data.copy_(values(param.shape, seed, index, number))
            self.add_module(name, layer.requires_grad_(name != "frozen"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [layer(x[:, : layer.in_features]) for name, layer in self.named_children() if name != "never"], 1
        )


class Perceptron(nn.Module):
    """Two layers as tensor parallelism cuts them: the first by rows, the second by columns."""

    def __init__(self, inputs: int, hidden: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden, outputs, bias=False, dtype=dtype)
        for number, param in enumerate(self.parameters()):
            param.data.copy_(values(param.shape, seed, 3, number))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def perceptron(recipe: Case, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Perceptron:
    sizes = (24, 256, 300) if has_tiles(recipe) else (48, 256, 7)
    return Perceptron(*sizes, dtype, seed).to(distributed.device())


def tensor_parallel(model: Perceptron) -> Perceptron:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh_of("tp")["tp"], plan)


def plain_model(recipe: Case, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Layers:
    return Layers(shapes_of(recipe), dtype, seed).to(distributed.device())


def shapes_of(recipe: Case) -> dict[str, tuple[int, int]]:
    return TILED_SHAPES if has_tiles(recipe) else SHAPES


def quantized_model(recipe: Case, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any) -> Layers:
    return quantize_model_(plain_model(recipe, dtype, seed), recipe_of(recipe), **options)


def weight_of(recipe: Case, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    return quantized_model(recipe, dtype, keep_initial=False).uneven.weight


def same_components(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    assert a.recipe == b.recipe and a.shape == b.shape and a.dtype == b.dtype
    return all(torch.equal(a.components[part.name], b.components[part.name]) for part in a.recipe.components)


def saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


class Run:
    """A quantized model, its optimizer, and training with given gradients.

    ``how``: plain, fsdp, hsdp, tp (FSDP2 over the shards of tensor parallelism) or quantized-tp (those are shards of
    weights that are quantized already). ``build``: the model.
    """

    def __init__(
        self,
        recipe: Case,
        how: str = "fsdp",
        dtype: torch.dtype = torch.bfloat16,
        *,
        build: Callable[..., nn.Module] | None = None,
        fresh: bool = False,
        **options: Any,
    ) -> None:
        self.model = (build or plain_model)(recipe, dtype, seed=1 if fresh else 0)
        if how == "tp":
            tensor_parallel(self.model)
        quantize_model_(self.model, recipe_of(recipe))
        if how == "quantized-tp":
            tensor_parallel(self.model)
        if how != "plain":
            mesh = mesh_of(how)
            fully_shard(self.model, mesh=mesh["dp"] if how.endswith("tp") else mesh)
        options = {
            "lr": 0.5 if fresh else 0.01,
            "weight_decay": 0.1,
            "decoupled_weight_decay": True,
            "seed": 3,
            **options,
        }
        # torch.distributed.checkpoint loads no states of frozen parameters.
        self.params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.optimizer = FusedAdam(self.params.values(), **options)

    def set_gradients(self, step: int) -> None:
        for index, (name, param) in enumerate(self.params.items()):
            if not name.startswith("never") and (index + step) % 4:  # not every one at every step
                param.grad = shard_like(gradient(param.shape, index, step).to(param.dtype), param)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.set_gradients(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Part]:
        """This rank's parts of parameters, components of quantized ones, masters and states."""
        found = parameter_parts(self.model)
        names = list(self.params)
        for index, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{names[index]}: {key}": part(value) for key, value in sorted(states.items())}
        return found


def mesh_of(how: str) -> DeviceMesh:
    """Of two dims where there are two kinds of parallelism: 2 x 2 ranks, or 1 x 2."""
    names = {"hsdp": ("replicate", "shard"), "tp": ("dp", "tp"), "quantized-tp": ("dp", "tp")}
    return distributed.mesh(dist.get_world_size() // 2, 2, names=names[how]) if how in names else distributed.mesh()


def gradient(shape: Iterable[int], index: int, step: int) -> Tensor:
    return values(shape, 7, index, step)


def parameter_parts(model: nn.Module) -> dict[str, Part]:
    found = {}
    for name, param in model.named_parameters():
        if isinstance(local_tensor(param), QuantizedTensor):
            found |= {f"{name}: {key}": value for key, value in component_parts(param).items()}
        else:
            found[f"{name}: parameter"] = part(param)
    return found


def component_parts(param: Tensor) -> dict[str, Part]:
    """This rank's entries of every component but initial values, and where they lie in the whole weight's component."""
    local: QuantizedTensor = local_tensor(param.detach())
    marker = torch.empty(local.shape)
    if isinstance(param, DTensor):
        marker = DTensor.from_local(
            marker, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
        )
    indices = part(marker)[1].view(local.shape).flatten(1)
    width = math.prod(param.shape[1:])
    rows, columns = indices[:, :1].flatten() // width, indices[:1].flatten() % width
    found = {}
    for component in local.recipe.components:
        value = local.components[component.name].detach().cpu().flatten().clone()
        shape = local.recipe.component_shape(component, tuple(param.shape))
        if component.tile is None:
            found[component.name] = (torch.Size(shape), torch.arange(value.numel()), value)
            continue
        row, column = (torch.unique(at // tile) for at, tile in zip((rows, columns), component.tile, strict=True))
        found[component.name] = (torch.Size(shape), (row[:, None] * shape[1] + column).flatten(), value)
    return found


# --- matrices to encode -----------------------------------------------------------------------------------------


def encoded(x: Tensor, recipe: Recipe, fractions: Tensor | None = None) -> QuantizedTensor:
    weight = QuantizedTensor.empty(recipe, x.shape, torch.float32, x.device)
    weight.write(x)
    if fractions is not None:
        recipe.encode(x, weight.components, fractions)
    return weight


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
shapes = st.sampled_from([(1, 2), (2, 16), (3, 34), (5, 130)])


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Values over several magnitudes, with zeros; drawn ones in the first row."""
    shape = draw(shapes)
    x = values(shape, draw(st.integers(0, 1000))) * 2.0 ** draw(st.integers(-60, 60))
    for column, value in enumerate(draw(st.lists(finite, max_size=min(shape[1], 6)))):
        x[0, column] = value
    return torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.1, 0.0, x)
