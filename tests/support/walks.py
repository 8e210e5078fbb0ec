"""Random walks: an optimizer that is interrupted in every way trains as one that is not, bit for bit.

Both make the same training: steps, writes, frozen parameters, new groups, other hyperparameters. One of them, the
walker, is also saved and loaded, copied, given other parameters, and compiled in between.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import cases
import distributed
from distributed import same_bits, shard_like
from fused_optim import enable_gradient_release
from fused_optim.state import host_states
from peers import FusedAdamW

SHAPES = [(6, 128), (7,), (4, 64), (3, 40)]  # of the first two groups, two each
LATE = [(5, 128), (9,), (2, 96)]  # of groups that are added
BATCH = 4


@dataclass(frozen=True)
class Config:
    """What is chosen once for a walk."""

    master: str
    formats: tuple[str, str]
    named: bool
    skips: bool
    compiles: bool = False


class Model(nn.Module):
    """Parameters whose gradients are given, by a backward pass, on a mesh of all ranks if there are several."""

    def __init__(self, config: Config, groups: Sequence[Sequence[tuple[int, ...]]], fills: float | None = None) -> None:
        super().__init__()
        dtype = cases.MASTER[config.master].param_dtype
        self.groups = [list(shapes) for shapes in groups]
        for i, shape in enumerate(shape for shapes in self.groups for shape in shapes):
            self.add(i, shape, dtype, fills)

    def add(self, i: int, shape: tuple[int, ...], dtype: torch.dtype, fills: float | None = None) -> nn.Parameter:
        value = normal(shape, i) if fills is None else torch.full(shape, fills)
        param = nn.Parameter(placed(value.to(dtype)))
        self.register_parameter(f"p{i}", param)
        return param

    def params_by_group(self) -> list[list[tuple[str, nn.Parameter]]]:
        named = iter(self.named_parameters())
        return [[next(named) for _ in shapes] for shapes in self.groups]

    def forward(self, inputs: list[Tensor]) -> Tensor:
        products = [
            (local(p).float() * x).sum() for p, x in zip(self.parameters(), inputs, strict=True) if p.requires_grad
        ]
        return torch.stack(products).sum()


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(value: Tensor) -> Tensor:
    several = dist.is_initialized() and dist.get_world_size() > 1
    return distributed.shard(value, distributed.mesh(), [Shard(0)]) if several else value


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@dataclass
class Run:
    """A model and its optimizer."""

    config: Config
    model: Model = field(init=False)
    optimizer: FusedAdamW = field(init=False)
    formats: list[dict[str, str]] = field(init=False)  # of the param groups

    def __post_init__(self) -> None:
        self.model = Model(self.config, [SHAPES[:2], SHAPES[2:]])
        self.formats = [self.first_formats(number) for number in range(2)]
        self.optimizer = self.build()

    def build(self, **options: Any) -> FusedAdamW:
        groups: list[dict[str, Any]] = []
        for number, members in enumerate(self.model.params_by_group()):
            params = members if self.config.named else [param for _, param in members]
            groups.append({"params": params, "weight_decay": 0.1 * number, **self.formats[number]})
        chosen = {**cases.MASTER[self.config.master].options, "skip_nonfinite": self.config.skips, **options}
        return FusedAdamW(groups, lr=0.01, seed=5, **chosen)

    def first_formats(self, group: int) -> dict[str, str]:
        moment, square = self.config.formats[:: -1 if group % 2 else 1]
        return {"exp_avg_dtype": moment, "exp_avg_sq_dtype": square}

    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


class Walk:
    """The walker and the other one, to which only training happens."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.walker, self.other = Run(config), Run(config)
        self.runs = (self.walker, self.other)
        self.steps = 0
        self.clips = self.spoils = False
        self.fraction = 0.0

    def train(self, compiled: bool = False) -> None:
        """A step of both."""
        self.steps += 1
        for run in self.runs:
            inputs = [
                local(shard_like(normal(tuple(p.shape), 1000 * self.steps + i).to(p.dtype).float(), p))
                for i, p in enumerate(run.params())
            ]
            if self.spoils and inputs[0].numel():
                inputs[0].view(-1)[0] = float("nan")

            def step(model: Model, optimizer: FusedAdamW, given: list[Tensor]) -> None:
                if any(p.requires_grad for p in model.parameters()):
                    model(given).backward()
                if self.clips:
                    optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()

            is_compiled = compiled and run is self.walker
            (torch.compile(step, backend="eager") if is_compiled else step)(run.model, run.optimizer, inputs)
        self.clips = self.spoils = False

    # --- training: of both --------------------------------------------------------------------------------------------

    def step(self, _: int) -> None:
        self.train()

    def write(self, which: int) -> None:
        """Into a parameter, by one of several ways."""
        for run in self.runs:
            param = run.params()[which % len(run.params())]
            value = shard_like(normal(tuple(param.shape), 7000 + self.steps).to(param.dtype), param)
            if which % 2:
                run.model.load_state_dict({**run.model.state_dict(), f"p{which % len(run.params())}": value})
            else:
                with torch.no_grad():
                    param.copy_(value)

    def freeze(self, which: int) -> None:
        for run in self.runs:
            run.params()[which % len(run.params())].requires_grad_(False)

    def unfreeze(self, which: int) -> None:
        for run in self.runs:
            run.params()[which % len(run.params())].requires_grad_(True)

    def set_options(self, which: int) -> None:
        changed = [{"lr": 0.003}, {"weight_decay": 0.3}, {"betas": (0.8, 0.99)}, {"eps": 1e-6}, {"maximize": True}]
        for run in self.runs:
            groups = run.optimizer.param_groups
            groups[which % len(groups)].update(changed[which % len(changed)])

    def set_formats(self, which: int) -> None:
        for run in self.runs:
            number = which % len(run.formats)
            run.formats[number]["exp_avg_dtype"] = self.config.formats[which % 2]
            run.optimizer.param_groups[number].update(run.formats[number])

    def refuse(self, which: int) -> None:
        """A step with a gradient that cannot be used, after clipping."""
        for run in self.runs:
            param = run.params()[which % len(run.params())]
            if local(param).numel() and param.requires_grad and not isinstance(param, DTensor):
                param.grad = torch.ones_like(param)
                run.optimizer.clip_grad_norm_(0.5)
                param.grad = param.grad.to_sparse()
                try:
                    run.optimizer.step()
                except RuntimeError:
                    run.optimizer.zero_grad()  # which drops the clipping, too
                else:
                    raise AssertionError("a sparse gradient was taken")

    def clip(self, _: int) -> None:
        """The next step."""
        self.clips = True

    def skip(self, _: int) -> None:
        """The next step, which has a NaN, where the optimizer skips such."""
        self.spoils = self.config.skips

    def add_group(self, which: int) -> None:
        if len(self.walker.model.groups) == 2 + len(LATE):
            return
        for run in self.runs:
            i, shape = len(run.params()), LATE[len(run.model.groups) - 2]
            param = run.model.add(i, shape, cases.MASTER[self.config.master].param_dtype)
            run.model.groups.append([shape])
            params: list[Any] = [(f"p{i}", param)] if self.config.named else [param]
            number = len(run.model.groups) - 1
            run.formats.append(run.first_formats(number))
            run.optimizer.add_param_group({"params": params, "weight_decay": 0.1 * number, **run.formats[number]})

    def start_anew(self, which: int) -> None:
        """By removing a parameter's states, in one of several ways."""
        for run in self.runs:
            state, param = run.optimizer.state, run.params()[which % len(run.params())]
            if which % 2:
                state[param].clear()
            else:
                state.pop(param, None)

    # --- interruptions: of the walker ---------------------------------------------------------------------------------

    def load(self, which: int, **options: Any) -> None:
        """Into another model and optimizer, in either order and form."""
        run = self.walker
        run.optimizer.checkpoint_format = ("unscaled", "native")[which % 2]
        saved = io.BytesIO()
        several = dist.is_initialized() and dist.get_world_size() > 1
        states = run.model.state_dict(), run.optimizer.state_dict()
        if not several:
            torch.save(states, saved)
            saved.seek(0)
            states = torch.load(saved, weights_only=True)
        states = copy.deepcopy(states)
        frozen = [not param.requires_grad for param in run.params()]
        run.model = Model(self.config, run.model.groups, fills=3.0)
        for param, is_frozen in zip(run.params(), frozen, strict=True):
            param.requires_grad_(not is_frozen)
        run.optimizer = run.build(checkpoint_format=run.optimizer.checkpoint_format, **options)
        if which % 4 < 2:
            run.model.load_state_dict(states[0])
            run.optimizer.load_state_dict(states[1])
        else:
            run.optimizer.load_state_dict(states[1])
            run.model.load_state_dict(states[0])
            run.optimizer.state_dict()  # remainders that wait for their parameters find these before anyone writes them

    def offload(self, which: int) -> None:
        self.load(which, offload_states=True, offload_fraction=(0.0, 0.4, 0.7, 1.0)[which % 4])

    def copy(self, which: int) -> None:
        self.walker.model, self.walker.optimizer = copy.deepcopy((self.walker.model, self.walker.optimizer))

    def pickle(self, which: int) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            return self.copy(which)  # a mesh is not pickled
        saved = io.BytesIO()
        torch.save((self.walker.model, self.walker.optimizer), saved)
        saved.seek(0)
        self.walker.model, self.walker.optimizer = torch.load(saved, weights_only=False)

    def initialize(self, which: int) -> None:
        """Of both: a step creates no states for what is frozen by then, and counts on where others have some."""
        for run in self.runs:
            run.optimizer.initialize_state()

    def look(self, which: int) -> None:
        """At what is saved, without saving it."""
        self.walker.optimizer.state_dict()

    def replace(self, which: int) -> None:
        """A parameter by one with its values, by the method or as Gaussian splatting does."""
        run = self.walker
        i = which % len(run.params())
        old = run.params()[i]
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        if which % 2 or old not in run.optimizer.state:
            run.optimizer.replace_parameters({old: new})
        else:
            self._move(run.optimizer, old, new)
        run.model.register_parameter(f"p{i}", new)

    @staticmethod
    def _move(optimizer: FusedAdamW, old: nn.Parameter, new: nn.Parameter) -> None:
        values = {name: optimizer.get_unscaled_state(old, name).clone() for name in list(optimizer.state[old])}
        del optimizer.state[old]
        for group in optimizer.param_groups:
            group["params"] = [new if param is old else param for param in group["params"]]
        for name, value in values.items():
            optimizer.set_scaled_state(new, name, value)

    def release(self, which: int) -> None:
        """Two steps with gradient release."""
        if self.config.skips or self.clips or not any(p.requires_grad for p in self.walker.params()):
            return
        handle = enable_gradient_release(self.walker.model, self.walker.optimizer, bucket_bytes=(0, 512)[which % 2])
        self.train()
        self.train()
        handle.disable()

    def compile(self, which: int) -> None:
        """A step, in a compiled loop."""
        if self.config.compiles:
            torch._dynamo.reset()  # each time: torch gives a function up that it has compiled for too many models
        self.train(compiled=self.config.compiles)

    # --- faults, to see that they are found ---------------------------------------------------------------------------

    def drop_bit(self, which: int) -> None:
        local(self.walker.params()[which].detach()).view(torch.int16)[0] ^= 1

    def drop_state(self, which: int) -> None:
        self.walker.optimizer.set_scaled_state(
            param := self.walker.params()[which], "exp_avg", local(param.detach()) * 0
        )

    def drop_step(self, which: int) -> None:
        self.walker.optimizer.param_groups[1]["step"] += 1

    # --- comparison ---------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Parameters, and all that belongs to them, bit for bit; without a look at state dicts."""
        walker, other = self.runs
        for i, (ours, theirs) in enumerate(zip(walker.params(), other.params(), strict=True)):
            assert same_bits(local(ours.detach()), local(theirs.detach())), f"parameter {i}"

    def compare_states(self) -> None:
        walker, other = (run.optimizer for run in self.runs)
        steps = [[int(group["step"]) for group in each.state_dict()["param_groups"]] for each in (walker, other)]
        assert steps[0] == steps[1], f"steps {steps}"
        for i, (ours, theirs) in enumerate(zip(self.walker.params(), self.other.params(), strict=True)):
            assert (ours in walker.store) == (theirs in other.store), f"states of parameter {i}"
            for name in other.state.get(theirs, ()):
                found, expected = (each.get_unscaled_state(p, name) for each, p in ((walker, ours), (other, theirs)))
                assert same_bits(local(found), local(expected)), f"{name} of parameter {i}"


TRAINING = (
    "step",
    "write",
    "freeze",
    "unfreeze",
    "set_options",
    "set_formats",
    "refuse",
    "clip",
    "skip",
    "add_group",
    "start_anew",
    "initialize",
)
INTERRUPTIONS = ("load", "offload", "copy", "pickle", "look", "replace", "release", "compile")
Operation = tuple[str, int]
NOTHING = "nothing"


def walk(config: Config, operations: Sequence[Operation]) -> str:
    """What went wrong, and where; empty if nothing did."""
    made: list[Operation] = []
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            both = Walk(config)
            for name, which in operations:
                if name != NOTHING:
                    made.append((name, which))
                    operation: Callable[[int], None] = getattr(both, name)
                    operation(which)
                    both.compare()
            both.train()
            both.compare()
            both.compare_states()
        except Exception as error:
            return f"{config}: after {made}: {type(error).__name__}: {error}"
    return ""
