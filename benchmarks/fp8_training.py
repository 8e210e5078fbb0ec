"""Forward and backward with FP8 products, BF16, torchao's float8 training and TransformerEngine, on one GPU.

A stack of blocks (RMSNorm, two D x D and three D x H linear layers, SwiGLU), in one process, all contenders in turn,
each of them eager and compiled where it can be. Also the parts alone: the products, casts and transposes, which sizes
of linear layers gain, and experts' layers.

    python benchmarks/fp8_training.py --output FILE
    python benchmarks/fp8_training.py --parts peers --output FILE  # the table of peers, about three minutes
    python benchmarks/fp8_training.py --device cpu --width 128 --hidden 256 --tokens 128 --blocks 1 --steps 1  # a trial
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    GroupedLinear,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.fp8 import casts, delayed, measured, products
from fused_optim.quantized.fp8.casts import Codes
from fused_optim.quantized.recipes import ProductFormat
from step import machine, synchronize, write

DECODED = Float8CurrentScaling(compute="decode")
PARTS = ("stack", "peers", "products", "casts", "sizes", "experts")
RECIPES: dict[str, Recipe] = {
    "FP8, one scale": Float8CurrentScaling(compute="fp8"),
    "FP8, one scale, delayed": Float8DelayedScaling(compute="fp8"),
    "FP8, one scale, all delayed": Float8DelayedScaling(compute="fp8", activation_scaling="delayed"),
    "FP8, one scale, all delayed, fast gradients": Float8DelayedScaling(
        compute="fp8", activation_scaling="delayed", fast_gradients=True
    ),
    "FP8, rows, weight gradients BF16": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
    "FP8, rows": Float8CurrentScaling(compute="fp8", activation_scaling="row", weight_gradients="fp8"),
    "FP8, rows, fast gradients": Float8CurrentScaling(
        compute="fp8", activation_scaling="row", weight_gradients="fp8", fast_gradients=True
    ),
    "FP8, one scale, weights kept": Float8CurrentScaling(compute="fp8", keep_weights=True),
    "FP8, blocks": Float8BlockScaling(compute="fp8"),
    "FP8, blocks, tiles": Float8BlockScaling(compute="fp8", activation_tiles=True),
}

# --- the stack ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """``linear(inputs, outputs)`` makes its layers."""

    def __init__(self, width: int, hidden: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = linear(width, width), linear(width, width)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.query(self.first_norm(x)))
        y = self.second_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def plain_linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


@dataclass(frozen=True)
class Contender:
    """``build(args)`` makes a model; ``around()`` is the context of its forward passes."""

    name: str
    build: Callable[[argparse.Namespace], nn.Module]
    compiled: bool
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def label(self) -> str:
        return f"{self.name}, {'compiled' if self.compiled else 'eager'}"


def stack(args: argparse.Namespace, linear: Callable[[int, int], nn.Module] = plain_linear) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(args.device):
        blocks = (Block(args.width, args.hidden, linear) for _ in range(args.blocks))
        return nn.Sequential(*blocks).bfloat16()


def ours(recipe: Recipe) -> Callable[[argparse.Namespace], nn.Module]:
    return lambda args: quantize_model_(stack(args), recipe, keep_initial=False)


def torchao_contenders() -> Iterator[Contender]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def build(recipe: str) -> Callable[[argparse.Namespace], nn.Module]:
        config = Float8LinearConfig.from_recipe_name(recipe)
        return lambda args: convert_to_float8_training(stack(args), config=config)

    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        yield Contender(f"torchao {recipe}", build(recipe), compiled=True)


def transformer_engine_contenders() -> Iterator[Contender]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

    make = getattr(te, "quantized_model_init", None) or te.fp8_model_init
    autocast = getattr(te, "autocast", None)

    def around(recipe: Any) -> AbstractContextManager[Any]:
        return autocast(enabled=True, recipe=recipe) if autocast else te.fp8_autocast(enabled=True, fp8_recipe=recipe)

    def linear(inputs: int, outputs: int) -> nn.Module:
        return te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16)

    def build(recipe: Any) -> Callable[[argparse.Namespace], nn.Module]:
        def build_one(args: argparse.Namespace) -> nn.Module:
            with make(enabled=True, recipe=recipe):
                return stack(args, linear)

        return build_one

    for recipe in (DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()):
        name = f"TransformerEngine {type(recipe).__name__}"
        yield Contender(name, build(recipe), compiled=False, around=lambda recipe=recipe: around(recipe))


PEERS = {"torchao": torchao_contenders, "transformer_engine": transformer_engine_contenders}


def contenders() -> Iterator[Contender]:
    yield Contender(PRODUCTS_NAME, ProductsAlone, compiled=False)
    for compiled in (False, True):
        yield Contender("BF16", stack, compiled)
        yield Contender("FP8 weights, decoded", ours(DECODED), compiled)
        for name, recipe in RECIPES.items():
            yield Contender(name, ours(recipe), compiled)
    for package, peers in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"skipped: {package} is not installed")
            continue
        try:
            yield from peers()
        except Exception as error:  # another version of it, or one that cannot load
            print(f"skipped: {package}: {error}")


DELAYED_NAME = "FP8, one scale, all delayed, fast gradients"
PRODUCTS_NAME = "FP8 products alone, one scale, fast"
TABLE = (  # of peers, in the order in which they are measured
    f"{PRODUCTS_NAME}, eager",
    *(f"{DELAYED_NAME}, {way}" for way in ("compiled", "eager")),
    *(f"FP8, one scale, {way}" for way in ("compiled", "eager")),
    *(f"FP8, rows, {way}" for way in ("compiled", "eager")),
    *(f"FP8, blocks, tiles, {way}" for way in ("compiled", "eager")),
    *(
        f"TransformerEngine {recipe}, eager"
        for recipe in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
    ),
    *(f"torchao {recipe}, compiled" for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    *(f"BF16, {way}" for way in ("compiled", "eager")),
)

REST = 0.3  # seconds
AHEAD = 40_000_000  # cycles: about 20 ms


class Timer:
    """Milliseconds of calls that are enqueued one after the other, as in training."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, function: Callable[[], Any], repeats: int) -> list[float]:
        if self.device.type != "cuda":
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                function()
                times.append(1000 * (time.perf_counter() - start))
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            function()
            event.record()
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


class Runner:
    """A contender's model, ready to be timed."""

    def __init__(self, contender: Contender, args: argparse.Namespace, device: torch.device) -> None:
        self.contender, self.device = contender, device
        self.model = contender.build(args)
        if contender.compiled:
            for part in (self.model,) if args.whole else self.model:
                part.compile(fullgraph=True)
        self.x = torch.randn(args.tokens, args.width, device=device).bfloat16().requires_grad_()
        self.gradient = torch.randn(args.tokens, args.width, device=device).bfloat16()

    def forward(self) -> Tensor:
        with self.contender.around():
            return self.model(self.x)

    def both(self) -> None:
        self.forward().backward(self.gradient)
        self.x.grad = None
        for param in self.model.parameters():
            param.grad = None

    def rested_ms(self, run: Callable[[], Any]) -> float:
        """Of one pass after a pause, so that heat and power do not limit clocks. The host is ahead of the device."""
        time.sleep(REST)
        torch.cuda._sleep(AHEAD)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        synchronize(self.device)
        return float(start.elapsed_time(end))

    def host_ms(self) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        self.both()
        spent = 1000 * (time.perf_counter() - start)
        synchronize(self.device)
        return spent


def measure(contender: Contender, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    timer = Timer(device)
    runner = Runner(contender, args, device)
    for _ in range(3):
        runner.both()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    both = timer(runner.both, args.steps)
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
    forward = timer(runner.forward, args.steps)
    with torch.no_grad():
        runner.forward()
        inference = timer(runner.forward, args.steps)
    row = {
        "forward_ms": statistics.median(forward),
        "forward_without_gradients_ms": statistics.median(inference),
        "both_ms": statistics.median(both),
        "host_ms": statistics.median(runner.host_ms() for _ in range(5)),
        "peak_gb": peak / 2**30,
        "weights_gb": held / 2**30,
    }
    if device.type == "cuda":
        for name, run in (("forward", runner.forward), ("both", runner.both)):
            row[f"{name}_rested_ms"] = statistics.median(runner.rested_ms(run) for _ in range(5))
    if re.search(args.profile, contender.label):
        print_profile(runner)
    return row


def print_profile(runner: Runner) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runner.both()
        synchronize(runner.device)
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=28, max_name_column_width=90))


def measure_stack(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    return measure_all(contenders(), args, device)


def measure_peers(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Ours at their fastest with each scaling, and what others have; where time runs out, the last rows are missing."""
    there = {contender.label: contender for contender in contenders()}
    for label in (label for label in TABLE if label not in there):
        print(f"not here: {label}", flush=True)
    return measure_all((there[label] for label in TABLE if label in there), args, device)


def measure_all(
    contenders: Iterable[Contender], args: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    columns = "forward", "no grad", "both", "host", "peak GB", "held GB", "rested", "both rested"
    print(f"{'':<50}" + "".join(f"{name:>12}" for name in columns))
    for contender in contenders:
        label = contender.label
        if not re.search(args.only, label):
            continue
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            row = measure(contender, args, device)
        except Exception as error:  # a peer's
            traceback.print_exc()
            row = {"error": repr(error)}
        print(
            f"{label:<50}" + "".join(f"{v:>12.2f}" if isinstance(v, float) else f" {v}" for v in row.values()),
            flush=True,
        )
        yield {"name": label, **row}


DELAYED = ProductFormat("tensor", torch.float8_e5m2, True, delayed=True)

# --- its parts ----------------------------------------------------------------------------------------------------


def shapes(args: argparse.Namespace) -> dict[str, tuple[int, int, int, int]]:
    """Rows of the first matrix, what is summed over, columns, and how many of it a stack has."""
    m, d, h = args.tokens, args.width, args.hidden
    found: dict[str, tuple[int, int, int, int]] = {}
    for outputs, inputs, count in ((d, d, 2), (h, d, 2), (d, h, 1)):
        layer = f"{outputs} x {inputs}"
        found[f"{layer}, output"] = (m, inputs, outputs, count * args.blocks)
        found[f"{layer}, input gradient"] = (m, outputs, inputs, count * args.blocks)
        found[f"{layer}, weight gradient"] = (outputs, m, inputs, count * args.blocks)
    return found


def random_codes(rows: int, columns: int, scaling: str, dtype: torch.dtype, device: torch.device) -> Codes:
    x = torch.randn(rows, columns, device=device).bfloat16()
    if scaling != "tile":
        return casts.cast(x, dtype, scaling, False)
    codes = casts.cast(x, dtype, "tensor", False)
    scale = torch.ones(-(-rows // casts.BLOCK), columns // casts.BLOCK, device=device)
    return Codes(codes.data, scale, "tile")


class ProductsAlone(nn.Module):
    """All FP8 products of the stack, of codes that are there, and nothing else: what no layers can be faster than."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        device = torch.device(args.device)
        self.passes: dict[bool, list[tuple[Codes, Codes, int]]] = {True: [], False: []}  # by whether they are forward
        for label, (m, k, n, count) in shapes(args).items():
            dtypes = (torch.float8_e4m3fn if label.endswith("output") else torch.float8_e5m2), torch.float8_e4m3fn
            codes = (random_codes(*sizes, "tensor", dtype, device) for sizes, dtype in zip(((m, k), (n, k)), dtypes))
            self.passes[label.endswith("output")].append((*codes, count))

    def forward(self, x: Tensor) -> Tensor:
        return _ProductsAlone.apply(x, self)

    def run(self, forward: bool) -> None:
        for a, b, count in self.passes[forward]:
            for _ in range(count):
                products.product(a, b, fast=True)


class _ProductsAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: ProductsAlone) -> Tensor:
        ctx.stack = stack
        stack.run(forward=True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stack.run(forward=False)
        return gradient, None


def measure_products(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Each product alone, and what a stack's products take together."""
    timer, rows = Timer(device), []
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    kinds: dict[str, tuple[str, str, torch.dtype, bool]] = {
        "one scale": ("tensor", "tensor", e4m3, False),
        "one scale, fast": ("tensor", "tensor", e4m3, True),
        "one scale, E5M2": ("tensor", "tensor", e5m2, False),
        "one scale, E5M2, fast": ("tensor", "tensor", e5m2, True),
        "rows": ("row", "row", e4m3, False),
        "rows, fast": ("row", "row", e4m3, True),
        "blocks, tiles": ("block", "tile", e4m3, False),
        "blocks": ("block", "block", e4m3, False),
    }
    totals = dict.fromkeys(["BF16", *kinds], 0.0)
    print(f"{'TFLOP/s':<36}" + "".join(f"{name:>22}" for name in totals))
    for label, (m, k, n, count) in shapes(args).items():
        row: dict[str, Any] = {"product": label}
        a, b = (torch.randn(size, k, device=device).bfloat16() for size in (m, n))
        runs: dict[str, Callable[[], Tensor]] = {"BF16": lambda a=a, b=b: a @ b.t()}
        for name, (first, second, dtype, fast) in kinds.items():
            codes = random_codes(m, k, first, dtype, device), random_codes(n, k, second, e4m3, device)
            runs[name] = lambda codes=codes, fast=fast: products.product(*codes, fast=fast)
        for name, run in runs.items():
            try:
                run()
                ms = statistics.median(timer(run, args.steps))
            except RuntimeError as error:
                print(f"{label}, {name}: {str(error).splitlines()[0]}")
                continue
            totals[name] += count * ms
            row[name] = 2e-9 * m * k * n / ms
        print(f"{label:<36}" + "".join(f"{row.get(name, 0.0):>22.0f}" for name in totals), flush=True)
        rows.append(row)
    print(f"{'all of the stack, ms':<36}" + "".join(f"{ms:>22.2f}" for ms in totals.values()), flush=True)
    return [*rows, {"product": "all", **totals}]


def measure_casts(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Casts and transposes, and the share of a copy's bandwidth at which they read and write what they must."""
    timer, rows = Timer(device), []
    wide = torch.randn(args.tokens, args.hidden, device=device).bfloat16()
    target = torch.empty_like(wide)
    copied = statistics.median(timer(lambda: target.copy_(wide), 3 * args.steps))
    bandwidth = 2 * wide.nbytes / copied
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    history = torch.zeros(1 + delayed.HISTORY, device=device)
    print(f"copy {bandwidth * 1e-9:.3f} TB/s" if device.type == "cuda" else "")
    for m, n in (
        (args.tokens, args.hidden),
        (args.tokens, args.width),
        (args.hidden, args.width),
        (args.width, args.width),
    ):
        x = torch.randn(m, n, device=device).bfloat16()
        codes = casts.cast(x, e4m3, "tensor", False).data
        half = x.half()
        runs: dict[str, tuple[Callable[[], Any], int]] = {
            "transpose": (lambda codes=codes: casts.transpose(codes), 2),
            "transpose, PyTorch": (lambda codes=codes: codes.view(torch.uint8).t().contiguous(), 2),
            "one scale": (lambda x=x: casts.cast_tensor(x, None, e4m3, True, False), 5),
            "one scale, both": (lambda x=x: casts.cast_tensor(x, None, e5m2, True, True), 6),
            "delayed, both": (lambda x=x, h=history: delayed.cast_both(x, e5m2, DELAYED, True, True, h), 4),
            "rows": (lambda x=x: casts.cast_rows(x, e4m3, True, False), 3),
            "rows, both": (lambda x=x: casts.cast_rows(x, e4m3, True, True), 6),
            "blocks": (lambda x=x: casts.cast_blocks(x, e4m3, False, False, True, False), 3),
            "blocks, both": (lambda x=x: casts.cast_blocks(x, e4m3, False, False, True, True), 4),
            "blocks and tiles": (lambda x=x: casts.cast_blocks(x, e4m3, False, True, True, True), 4),
            "one scale, both, FP16": (lambda x=half: casts.cast_tensor(x, None, e5m2, True, True), 6),
            "rows, both, FP16": (lambda x=half: casts.cast_rows(x, e4m3, True, True), 6),
        }
        for name, (run, bytes_per_element) in runs.items():
            run()
            ms = statistics.median(timer(run, 3 * args.steps))
            share = bytes_per_element * m * n / ms / bandwidth
            rows.append({"cast": name, "shape": (m, n), "ms": ms, "share_of_copy": share})
            print(f"{name:<24}{m:>8} x {n:<8}{ms:>10.4f} ms{share:>10.1%}", flush=True)
    return rows


def measure_sizes(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Forward and backward of one linear layer on the GPU, without the host, in BF16 and in FP8: which sizes gain.

    Its rows are what ``fused_optim.quantized.gains(table=...)`` reads.
    """
    timer, rows = Timer(device), []
    for tokens, (inputs, outputs) in itertools.product(TOKENS, SIZES):
        row: dict[str, Any] = {"rows": tokens, "inputs": inputs, "outputs": outputs}
        kinds: dict[str, Recipe] = {}
        for recipe in RECIPES.values():  # the first of a kind: others are faster
            kinds.setdefault(measured.kind_of(recipe.products, recipe.keeps_weights), recipe)
        for name, recipe in (("BF16", None), ("decoded", DECODED), *kinds.items()):
            layer = nn.Linear(inputs, outputs, bias=False, device=device).bfloat16()
            if recipe is not None:
                quantize_model_(layer, recipe, lambda *_: True, keep_initial=False)
            row[name] = statistics.median(timer(replay_of(layer, tokens, device), args.steps))
        rows.append(row)
        print(", ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    return rows


def measure_experts(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Forward and backward of one layer of experts, who have as many rows each, in eager mode.

    Its rows are what ``compute="auto"`` goes by (``rows``: of each expert).
    """
    timer, rows = Timer(device), []
    recipes: dict[str, Recipe | None] = {"BF16": None, "decoded": DECODED}
    for recipe in RECIPES.values():
        recipes.setdefault(measured.kind_of(recipe.products, recipe.keeps_weights), recipe)
    for experts, inputs, outputs in EXPERTS if device.type == "cuda" else [(2, 128, 128)]:
        for each in (128, 256, 512, 1024, 2048) if device.type == "cuda" else [64]:
            offsets = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * each
            row: dict[str, Any] = {"experts": experts, "rows": each, "inputs": inputs, "outputs": outputs}
            for name, recipe in recipes.items():
                if name == "block" and experts > 16:  # one by one
                    continue
                layer = GroupedLinear(experts, inputs, outputs, device=device, dtype=torch.bfloat16, multiple_of=16)
                if recipe is not None:
                    quantize_model_(layer, recipe, lambda *_: True, keep_initial=False)
                row[name] = time_of_experts(layer, offsets, timer, args)
                if name == "tensor":
                    layer.multiple_of = 8
                    row["tensor, not aligned"] = time_of_experts(layer, offsets, timer, args)
            rows.append(row)
            print(", ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    return rows


def time_of_experts(layer: GroupedLinear, offsets: Tensor, timer: Timer, args: argparse.Namespace) -> float:
    _, outputs, inputs = layer.weight.shape
    count = int(offsets[-1])
    x = torch.randn(count, inputs, device=offsets.device).bfloat16().requires_grad_()
    gradient = torch.randn(count, outputs, device=offsets.device).bfloat16()

    def both() -> None:
        layer.weight.grad = x.grad = None
        layer(x, offsets).backward(gradient)

    both()
    return statistics.median(timer(both, args.steps))


def replay_of(layer: nn.Linear, tokens: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward of a layer as a CUDA graph."""
    x = torch.randn(tokens, layer.in_features, device=device).bfloat16().requires_grad_()
    gradient = torch.randn(tokens, layer.out_features, device=device).bfloat16()

    def run() -> None:
        layer.weight.grad = x.grad = None
        layer(x).backward(gradient)

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


TOKENS = (256, 512, 1024, 2048, 8192, 32768)
SIZES = [(1024, 1024), (2048, 2048), (4096, 1024), (4096, 4096), (4096, 14336), (8192, 8192)]

EXPERTS = [(8, 4096, 14336), (16, 4096, 4096), (64, 2048, 1408)]  # Mixtral 8x7B's, -, DeepSeek-V2-Lite's

MEASURES: dict[str, Callable[[argparse.Namespace, torch.device], Iterable[dict[str, Any]]]] = {
    "products": measure_products,
    "casts": measure_casts,
    "stack": measure_stack,
    "peers": measure_peers,
    "sizes": measure_sizes,
    "experts": measure_experts,
}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Of the stack, and how many steps are timed."""
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=["products", "casts", "stack"])
    add_sizes(parser)
    parser.add_argument("--whole", action="store_true", help="compile the whole stack at once, not each block")
    parser.add_argument("--only", default="", help="contenders whose name this regular expression matches")
    parser.add_argument("--profile", default="^$", help="contenders whose kernels are listed, likewise")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    torch.manual_seed(0)
    options = {key: value for key, value in vars(args).items() if key not in ("output", "commit")}
    report: dict[str, Any] = {"machine": machine(device, args.commit), "options": options}
    print(report["machine"], flush=True)
    for part in args.parts:
        print(f"\n{part}", flush=True)
        report[part] = []
        for row in MEASURES[part](args, device):
            report[part].append(row)
            write(report, args.output)


if __name__ == "__main__":
    main()
