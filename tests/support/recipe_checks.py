"""What holds of every recipe of quantized weights: checks for the rows of ``quantized_cases.RECIPES``, or any other.

Recipes are told apart by what they say of themselves. On several ranks a check takes many recipes at once.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import distributed
from checkpoint_cases import WAYS as WAYS_TO_SAVE
from distributed import Part, assert_same, join_all
from fused_optim.quantized import QuantizedTensor, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from peers import FusedAdam
from quantized_cases import (
    Case,
    Layers,
    Run,
    encoded,
    mesh_of,
    parameter_parts,
    perceptron,
    plain_model,
    quantized_model,
    recipe_of,
    same_components,
    saved,
    values,
    weight_of,
)

# --- values -----------------------------------------------------------------------------------------------------


def check_zeros(case: Case) -> None:
    recipe = recipe_of(case)
    weight = encoded(torch.zeros(5, 130), recipe)
    assert not weight.values().any() and weight.values().isfinite().all()
    assert all(part.isfinite().all() for part in weight.components.values() if part.is_floating_point())
    x = values((5, 130), 1)
    x[1], x[:, 32:64] = 0.0, 0.0
    decoded = encoded(x, recipe).values()
    assert not decoded[x == 0].any()


def check_not_finite(case: Case, bad: float, poisoned: slice = slice(40, 41)) -> None:
    """An element at row 2, column 40 makes ``poisoned`` of the row NaN, and nothing else."""
    recipe = recipe_of(case)
    x = values((5, 256), 1)
    clean = x.clone()
    clean[2, 40] = 0.0
    x[2, 40] = bad
    decoded, expected = (encoded(each, recipe).values() for each in (x, clean))
    assert decoded[2, 40].isnan()
    assert decoded[2, poisoned].isnan().all() and decoded.isnan().sum() == poisoned.stop - poisoned.start
    decoded[2, poisoned], expected[2, poisoned] = 0.0, 0.0
    assert torch.equal(decoded, expected)


# --- the tensor -------------------------------------------------------------------------------------------------


def check_cuts(case: Case, columns: int = 1) -> None:
    """Between rows, and between blocks of so many columns, they are weights themselves; others show the same values."""
    weight = QuantizedTensor.from_values(values((384, 256), 1), recipe_of(case))
    plain = weight.dequantize()
    rows = [(slice(128, 256),), (slice(3),), (slice(300),), (slice(100, 131),), (slice(130, 384),), (slice(5, 5),)]
    for at in (*rows, (slice(None), slice(128, 256)), (slice(0, 100), slice(128, None))):
        assert type(weight[at]) is QuantizedTensor and torch.equal(weight[at].dequantize(), plain[at])
    for part, expected in zip(weight.split(100), plain.split(100), strict=True):
        assert torch.equal(part.dequantize(), expected)
    for part, expected in zip(weight[100:][30:200].chunk(2, dim=1), plain[130:300].chunk(2, dim=1), strict=True):
        assert torch.equal(part.dequantize(), expected)
    within = weight[:, 1:3]
    assert torch.equal(within.dequantize(), plain[:, 1:3]) and (type(within) is QuantizedTensor) == (columns == 1)


def check_slices_share_memory(case: Case) -> None:
    source, target = (QuantizedTensor.from_values(values((384, 256), seed), recipe_of(case)) for seed in (1, 2))
    for rows in (slice(0, 128), slice(128, None)):
        for columns in (slice(0, 128), slice(128, None)):
            target.detach()[rows][:, columns].copy_(source[rows, columns])
    for name, value in source.components.items():
        assert torch.equal(target.components[name], value), name


def check_pickling(case: Case) -> None:
    """Bytes and flags are kept, initial values are not."""
    model = quantized_model(case)
    for weight in (model.uneven.weight, model.frozen.weight):
        for loaded in (pickle.loads(pickle.dumps(weight)), torch.load(saved(weight), weights_only=True)):
            assert isinstance(loaded, nn.Parameter) and loaded.requires_grad == weight.requires_grad
            assert same_components(loaded, weight) and not loaded.has_initial
    assert type(torch.load(saved(model.uneven.weight.detach()), weights_only=True)) is QuantizedTensor


def check_state_dicts(case: Case, assign: bool) -> None:
    state = torch.load(saved(quantized_model(case).state_dict()), weights_only=True)
    model = quantized_model(case, seed=1)
    model.load_state_dict(state, assign=assign)
    assert same_components(model.uneven.weight, weight_of(case))


# --- FSDP2 ------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
MIXED_WAYS = ("mixed",)  # of FP32 weights


def dtype_of(way: str) -> torch.dtype:
    return torch.float32 if way in MIXED_WAYS else torch.bfloat16


def sharded(model: Layers, way: str, how: str = "fsdp") -> Layers:
    """Some layers in groups of their own, the others with the root."""
    options = {"mesh": mesh_of(how), **WAYS[way]}
    for layer in (model.uneven, model.frozen):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def gather_each(recipes: Sequence[Case], how: str) -> dict[Case, tuple[dict[str, Part], dict[str, Tensor]]]:
    """The shards, and the whole weights as FSDP2 gives them to the layers."""
    found = {}
    for recipe in recipes:
        model = sharded(quantized_model(recipe), "resharded", how)
        shards = parameter_parts(model)
        gathered = {}
        for layer in (model, model.uneven, model.frozen):
            layer.unshard()
        for name, param in model.named_parameters():
            if isinstance(param, QuantizedTensor):
                gathered |= {
                    f"{name}: {part.name}": param.components[part.name].clone().cpu()
                    for part in param.recipe.components
                    if part.name != "amax_history"
                }
        found[recipe] = shards, gathered
    return found


def check_gathered(recipes: Sequence[Case], ranks: int, how: str, on: str) -> None:
    """The gathered weights are the shards, bit for bit."""
    results = distributed.run(ranks, gather_each, recipes, how, on=on)
    for recipe in recipes:
        whole = parameter_parts(quantized_model(recipe))
        joined = join_all([result[recipe][0] for result in results])
        assert_same(joined, join_all([whole]))
        for _, gathered in (result[recipe] for result in results):
            assert len(gathered) >= 6
            assert_same(gathered, {name: joined[name] for name in gathered})


def compare_each(cases: Sequence[tuple[Case, str]], how: str) -> list[str]:
    """Trains quantized models and plain ones that are given their decoded weights; where the two differ."""
    return [text for recipe, way in cases for text in compare(recipe, way, how)]


def compare(recipe: Case, way: str, how: str) -> list[str]:
    dtype = dtype_of(way)
    model = sharded(quantized_model(recipe, dtype), way, how)
    plain = sharded(plain_model(recipe, dtype), way, how)
    optimizer = FusedAdam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    different = []
    for step in range(2):
        for name, param in plain.named_parameters():
            local = local_tensor(model.get_parameter(name).detach())
            given = local.dequantize() if isinstance(local, QuantizedTensor) else local
            local_tensor(param.detach()).copy_(given)
        results = [train(each, step, way) for each in (model, plain)]
        if not torch.equal(*results):
            different.append(f"{recipe} {way}: outputs of step {step}")
        for name, param in plain.named_parameters():
            grad, expected = model.get_parameter(name).grad, param.grad
            if (grad is None) != (expected is None):
                different.append(f"{recipe} {way}: whether {name} has a gradient")
            elif grad is not None and not torch.equal(local_tensor(grad), local_tensor(expected)):
                different.append(f"{recipe} {way}: gradient of {name} in step {step}")
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
    return different


def train(model: Layers, step: int, way: str) -> Tensor:
    """The outputs of two micro-batches, whose gradients are accumulated and reduced once."""
    outputs = []
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        x = values((3, 144), 9, step, micro, dist.get_rank()).to(dtype_of(way))
        outputs.append(model(x))
        outputs[-1].float().square().mean().backward()
    return torch.cat(outputs).detach()


def check_training(cases: Sequence[tuple[Case, str]], ranks: int, how: str, on: str) -> None:
    """Losses and gradients are those of the decoded weights; a case is a recipe and one of ``WAYS``."""
    for different in distributed.run(ranks, compare_each, cases, how, on=on):
        assert not different


# --- the optimizer ----------------------------------------------------------------------------------------------


def train_each(recipes: Sequence[Case], how: str, master_weights: bool) -> dict[Case, dict[str, Part]]:
    """``how``: as of ``Run``, or "plain tp" for the model of tensor parallelism on one process."""
    found = {}
    for recipe in recipes:
        build = perceptron if how.endswith("tp") else None
        run = Run(recipe, how.removesuffix(" tp"), master_bits=32 if master_weights else 0, build=build)
        run.train(0, 5)
        found[recipe] = run.snapshot()
    return found


@functools.cache
def trained_whole(recipes: tuple[Case, ...], how: str, master_weights: bool, on: str) -> dict[Case, dict[str, Tensor]]:
    """Of one process that shards nothing."""
    (found,) = distributed.run(1, train_each, recipes, how, master_weights, on=on)
    return {recipe: join_all([parts]) for recipe, parts in found.items()}


def check_ranks(recipes: Sequence[Case], ranks: int, how: str, master_weights: bool, on: str) -> None:
    """They do not change a bit."""
    results = distributed.run(ranks, train_each, recipes, how, master_weights, on=on)
    expected = trained_whole(tuple(recipes), "plain tp" if how.endswith("tp") else "plain", master_weights, on)
    for recipe in recipes:
        assert_same(join_all([result[recipe] for result in results]), expected[recipe])


def check_masters(case: Case, dtype: torch.dtype) -> None:
    """They follow AdamW of plain weights."""
    run, plain = Run(case, "plain", dtype), plain_model(case, dtype).float()
    reference = FusedAdam(
        [p for p in plain.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    )
    torch_adamw = torch.optim.AdamW([p for p in plain_model(case, dtype).float().parameters() if p.requires_grad])
    torch_adamw.param_groups[0].update(lr=0.01, weight_decay=0.1)
    for step in range(4):
        run.set_gradients(step)
        grads = [param.grad for param in run.params.values()]
        for optimizer in (reference, torch_adamw):
            for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
                param.grad = grad if grad is None else grad.float()
            optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()
    masters = run.optimizer.master_state_dict(run.model)
    for index, name in enumerate(run.params):
        same, near = (optimizer.param_groups[0]["params"][index].detach() for optimizer in (reference, torch_adamw))
        assert torch.equal(masters[name], same), name
        if "never" not in name:  # torch counts the steps of each parameter
            assert torch.allclose(masters[name], near, atol=0.05), name


def check_weights_are_masters(case: Case) -> None:
    """Quantized anew after every step."""
    run = Run(case, "plain")
    run.train(0, 3)
    weight = run.model.uneven.weight
    master = run.optimizer.state[weight]["master_param"]
    if "amax_history" in weight.components:  # the scale is that of earlier steps
        step = weight.components["tensor_scale"]
        assert ((weight.values() - master).abs() <= torch.maximum(master.abs() / 16, step * 2**-10))[
            master.abs() <= 448 * step
        ].all()
    else:
        expected = QuantizedTensor.from_values(master, recipe_of(case))
        assert torch.equal(weight.values(), expected.values())


def check_steps_without_masters(case: Case) -> None:
    """Steps of a fraction of the spacing of codes: rounding to nearest would never move."""
    model = nn.Sequential(nn.Linear(128, 256, bias=False))
    model[0].weight.data = 1 + 0.2 * torch.rand(256, 128)
    model[0].weight.data[::128, 0] = 1.5  # keeps scales where they are
    quantize_model_(model, recipe_of(case))
    optimizer = FusedAdam(model.parameters(), lr=1e-3, betas=(0.0, 0.0), eps=1e-12, master_bits=0)
    start = model[0].weight.values()
    for _ in range(64):
        model[0].weight.grad = torch.ones(256, 128)
        model[0].weight.grad[::128, 0] = 0.0
        optimizer.state or optimizer.initialize_state()
        optimizer.step()
    moved = (start - model[0].weight.values()).mean()
    assert "master_param" not in optimizer.state[model[0].weight]
    assert abs(float(moved) - 0.064) < 0.006


def skip_steps(recipes: Sequence[Case], how: str) -> dict[Case, list[dict[str, Part]]]:
    found: dict[Case, list[dict[str, Part]]] = {}
    for recipe in recipes:
        run = Run(recipe, how)
        run.train(0, 2)
        before = run.snapshot()
        for flag in (1.0, 0.0):
            run.set_gradients(2)
            scale, found_inf = torch.tensor([1.0, flag], device=distributed.device())
            run.optimizer.grad_scale, run.optimizer.found_inf = scale, found_inf
            run.optimizer.step()
            found.setdefault(recipe, [before]).append(run.snapshot())
        run = Run(recipe, how)
        run.train(0, 3)
        found[recipe].append(run.snapshot())
    return found


def check_skipped_steps(recipes: Sequence[Case], ranks: int, how: str, on: str) -> None:
    """They leave data, scales and histories."""
    results = distributed.run(ranks, skip_steps, recipes, how, on=on)
    for recipe in recipes:
        before, skipped, stepped, straight = (join_all([result[recipe][at] for result in results]) for at in range(4))
        assert_same(skipped, before)
        assert_same(stepped, straight)
        assert any(not torch.equal(stepped[name], before[name]) for name in before)


# --- checkpoints ------------------------------------------------------------------------------------------------

SAVED_AT, END = 3, 5
save, load = WAYS_TO_SAVE["nested"]


def train_and_save(recipes: Sequence[Case], folder: str) -> dict[Case, dict[str, Part]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe)
        run.train(0, SAVED_AT)
        save(run, f"{folder}/{recipe}")
        found[recipe] = run.snapshot()
    return found


def load_and_save(recipes: Sequence[Case], source: str, target: str) -> dict[Case, list[dict[str, Part]]]:
    """What is loaded into a fresh run and saved again, and what training makes of it."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, fresh=True)
        load(run, f"{source}/{recipe}")
        save(run, f"{target}/{recipe}")
        loaded = run.snapshot()
        run.train(SAVED_AT, END)
        found[recipe] = [loaded, run.snapshot()]
    return found


def train_straight(
    recipes: Sequence[Case], build: Callable[..., nn.Module] | None
) -> dict[Case, list[dict[str, Part]]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe, "plain", build=build)
        run.train(0, SAVED_AT)
        half_way = run.snapshot()
        run.train(SAVED_AT, END)
        found[recipe] = [half_way, run.snapshot()]
    return found


@functools.cache
def straight(
    recipes: tuple[Case, ...], on: str, build: Callable[..., nn.Module] | None = None
) -> dict[Case, list[dict[str, Tensor]]]:
    """What runs of one process that are never interrupted have when others are saved, and at the end."""
    (found,) = distributed.run(1, train_straight, recipes, build, on=on)
    return {recipe: [join_all([parts]) for parts in snapshots] for recipe, snapshots in found.items()}


def check_checkpoints(recipes: Sequence[Case], ranks: tuple[int, ...], on: str, folder: str) -> None:
    """Saved on so many ranks, then loaded, saved and loaded again on others: training goes on as if never stopped."""
    expected = straight(tuple(recipes), on)
    results = distributed.run(ranks[0], train_and_save, recipes, f"{folder}/0", on=on)
    for recipe in recipes:
        assert_same(join_all([result[recipe] for result in results]), expected[recipe][0])
    for number, target in enumerate(ranks[1:]):
        paths = f"{folder}/{number}", f"{folder}/{number + 1}"
        loaded = distributed.run(target, load_and_save, recipes, *paths, on=on)
        for recipe in recipes:
            for at in (0, 1):
                assert_same(join_all([result[recipe][at] for result in loaded]), expected[recipe][at])
