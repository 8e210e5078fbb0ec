"""The scalars of a step: hyperparameters, and on its device step counters and learning rates.

CUDA graphs replay a step without Python, and a step that ``found_inf`` skips must not count although the host does not
know of it. So in both cases the true step counter is on the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_optim.memory.layout import INITIAL_LR, STEP
from fused_optim.options.checks import check_decoupled_lr, check_hyperparameters
from fused_optim.options.table import Settings, read_group, whole_number_of
from fused_optim.rules import Hyper, Orthogonalization, Rule
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.state.groups import Group
from fused_optim.state.store import StateStore

Groups = Sequence[Group]

_WORKSPACE_BYTES = 128  # per param group; the engine checks it


def host_lr(group: Group) -> float | None:
    """The learning rate, None where only a device knows it."""
    lr = group["lr"]
    return None if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


def is_capturable_on(device: torch.device, settings: Settings) -> bool:
    """True if CUDA graphs may hold steps there, which then read all scalars from the device."""
    return settings.capturable and device.type == "cuda"


def keep_rates(groups: Groups, rates: list[float | Tensor]) -> None:
    """Captured graphs read learning rates that are tensors: what was loaded in their places goes into them."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(rate, Tensor):
            group["lr"] = rate.copy_(torch.as_tensor(group["lr"], dtype=rate.dtype).reshape(rate.shape))


def on_device(scalar: Tensor, device: torch.device) -> Tensor:
    """As the engines read it: FP32 on their device; the tensor itself where it is that already."""
    return local_tensor(scalar).to(device=device, dtype=torch.float32).resolve_neg()


@dataclass
class _OnDevice:
    steps: Tensor  # int64, one per param group
    lrs: Tensor  # FP32, one per param group

    def __post_init__(self) -> None:
        self.step, self.lr = self.steps.unbind(), self.lrs.unbind()


class DeviceScalars:
    """The scalars of one optimizer on all of its devices. They keep their addresses, for the graphs that hold them."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, _OnDevice] = {}
        self._steps: list[int] = []  # group["step"] as it was last seen here
        self._lrs: list[float | None] = []
        self.captured = False
        self._workspaces: dict[torch.device, Tensor] = {}
        self._factors: dict[torch.device, Tensor] = {}
        self._retired: list[object] = []
        self.ahead = False  # the counters may differ from group["step"], and are right

    def prepare(self, devices: Iterable[torch.device], groups: Groups, capturing: bool) -> None:
        """Allocate what is missing, and write the steps and learning rates that were changed from outside.

        Raises RuntimeError where one of these is needed during a capture, in which it would become part of the graph.
        """
        devices = list(devices)
        if len(self._steps) != len(groups) or set(devices) != set(self._devices):
            _refuse(capturing, "this optimizer has made no step in its present form")
            self._allocate(devices, groups)
        for number, group in enumerate(groups):
            if group["step"] != self._steps[number]:
                _refuse(capturing, f"param group {number}: 'step' was changed since the last step")
                self._write_step(number, group)
            if host_lr(group) != self._lrs[number]:
                _refuse(capturing, f"param group {number}: 'lr' was changed since the last step")
                self._write_lr(number, group)

    def _allocate(self, devices: list[torch.device], groups: Groups) -> None:
        self.pull(groups)
        for device in list(self._devices):
            if len(self._steps) != len(groups) or device not in devices:
                self.retire(self._devices.pop(device))
        for device in devices:
            if device not in self._devices:
                self._devices[device] = _OnDevice(
                    steps=torch.zeros(len(groups), dtype=torch.int64, device=device),
                    lrs=torch.zeros(len(groups), dtype=torch.float32, device=device),
                )
        self._steps, self._lrs = [0] * len(groups), [None] * len(groups)
        self.write(groups)

    def write(self, groups: Groups) -> None:
        """Make ``group["step"]`` and ``group["lr"]`` the truth, where scalars exist for these groups."""
        if len(self._steps) == len(groups):
            for number, group in enumerate(groups):
                self._write_step(number, group)
                self._write_lr(number, group)

    def _write_step(self, number: int, group: Group) -> None:
        self._steps[number] = int(group["step"])
        for scalars in self._devices.values():
            scalars.step[number].fill_(self._steps[number])

    def _write_lr(self, number: int, group: Group) -> None:
        self._lrs[number] = value = host_lr(group)
        if value is not None:
            for scalars in self._devices.values():
                scalars.lr[number].fill_(value)

    def count(self, groups: Groups, capturing: bool) -> None:
        """After a step: the host counts as if it had not been skipped. A captured step has not been made yet."""
        self.ahead = True
        self.captured |= capturing
        if not capturing:
            self._steps = [int(group["step"]) for group in groups]

    def pull(self, groups: Groups) -> None:
        """Bring ``group["step"]`` up to date, except where it was changed from outside. Waits for the device."""
        if not self.ahead or not self._devices:
            return
        counted = next(iter(self._devices.values())).steps.tolist()
        for number, (group, steps) in enumerate(zip(groups, counted, strict=False)):
            if group["step"] == self._steps[number]:
                group["step"] = self._steps[number] = steps
        self.ahead = self.captured  # a graph may be replayed at any time

    def step(self, device: torch.device, number: int) -> Tensor:
        return self._devices[device].step[number]

    def lr(self, device: torch.device, number: int) -> Tensor:
        return self._devices[device].lr[number]

    def workspaces(self, devices: Iterable[torch.device], groups: Groups) -> dict[torch.device, Tensor]:
        """GPU memory in which the CUDA engine derives scalars from hyperparameters on the device."""
        for device in devices:
            size = _WORKSPACE_BYTES * len(groups)
            if device.type == "cuda" and (device not in self._workspaces or self._workspaces[device].nbytes < size):
                self.retire(self._workspaces.get(device))
                self._workspaces[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspaces

    def factor(self, device: torch.device) -> Tensor:
        """An FP32 scalar that gradients are multiplied by, 1 when new."""
        if device not in self._factors:
            self._factors[device] = torch.ones((), dtype=torch.float32, device=device)
        return self._factors[device]

    def retire(self, memory: object) -> None:
        """Graphs that were captured go on writing to what they know, although nothing else uses it any more."""
        if self.captured:
            self._retired.append(memory)


_COMPARED = (float, int, bool, str, tuple, list)  # by value; all else by identity


class _GroupRead(NamedTuple):
    """A param group as it was last checked. ``known``: its options but the learning rate; ``size``: of the dict."""

    known: Mapping[str, Any]
    size: int
    planned: list[Any]  # formats, and the rule's keys that decide collectives
    rule: Rule
    values: Mapping[str, float]
    weight_decay: float
    maximize: bool
    orthogonalization: Orthogonalization | None

    def matches(self, group: Group) -> bool:
        """True if the group was not written since, but for the learning rate, which still is a finite float."""
        rate = group.get("lr")
        if len(group) != self.size or type(rate) is not float or not math.isfinite(rate):
            return False
        for key, value in self.known.items():
            given = group.get(key, self)
            if given is not value and not (type(given) is type(value) in _COMPARED and given == value):
                return False
        return True


class Hyperparameters:
    """The hyperparameters of an optimizer's param groups.

    ``planned_changes`` counts changes of formats and of keys that decide collectives: earlier plans no longer fit then.
    """

    def __init__(self, store: StateStore, scalars: DeviceScalars) -> None:
        self._store, self._scalars = store, scalars
        self._read: list[_GroupRead] = []
        self.planned_changes = 0

    def check(self) -> None:
        """Read and check values that were written into running param groups. Raises ValueError or TypeError."""
        del self._read[len(self._store.groups) :]
        for number, group in enumerate(self._store.groups):
            try:
                if number >= len(self._read) or not self._read[number].matches(group):
                    before, read = self._read[number : number + 1], self._check(group)
                    self.planned_changes += not before or before[0].planned != read.planned
                    self._read[number : number + 1] = [read]
                if type(group[STEP]) is not int:
                    whole_number_of(STEP, group[STEP])
            except KeyError as error:
                hint = "it keeps its hyperparameters and its algorithm: make a new optimizer for others"
                raise ValueError(f"param group {number} has no {error.args[0]!r} any more; {hint}") from error
            except (TypeError, ValueError) as error:
                raise type(error)(f"param group {number}: {error}") from error

    def _check(self, group: Group) -> _GroupRead:
        store = self._store
        read, rule = read_group(group, store.defaults), store.rule.for_group(group)
        check_hyperparameters({**group, **read} if read else group, store.rule, running=True)
        if store.settings.decoupled_lr:
            check_decoupled_lr(group, rule)
        group.update(read)
        keys = [key for key in (*store.defaults, INITIAL_LR) if key in group and key != "lr"]
        planned = [*(spec.option for spec in store.rule.states), *rule.collective_keys]
        return _GroupRead(
            known={key: _copied(group[key]) for key in keys},
            size=len(group),
            planned=[_copied(group.get(key)) for key in planned],
            rule=rule,
            values=rule.hyperparameters(group),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            orthogonalization=rule.orthogonalization(group) if rule.whole_matrices else None,
        )

    def on(
        self,
        device: torch.device,
        scale: Tensor | None = None,
        factor: Tensor | None = None,
        found_inf: Tensor | None = None,
        counted: Collection[int] = (),
    ) -> list[Hyper]:
        """The scalars of the next step by param group, as they were last checked.

        Gradients are divided by ``scale`` and multiplied by ``factor``; ``found_inf``: not 0 skips the step.
        ``counted``: groups whose steps the device counts.
        """
        settings = self._store.settings
        reads_rates = is_capturable_on(device, settings)
        scale, factor, found_inf = [s if s is None else on_device(s, device) for s in (scale, factor, found_inf)]
        hypers = []
        for number, (group, read) in enumerate(zip(self._store.groups, self._read, strict=True)):
            rate = host_lr(group)
            if rate is None:
                lr: float | Tensor = on_device(group["lr"], device)
            else:
                lr = self._scalars.lr(device, number) if reads_rates else rate
            hyper = Hyper(
                rule=read.rule,
                lr=lr,
                values=read.values,
                decoupled=read.rule.decoupled,
                weight_decay=read.weight_decay / (group[INITIAL_LR] if settings.decoupled_lr else 1.0),
                step=int(group[STEP]) + 1,
                maximize=read.maximize,
                stochastic_rounding=settings.stochastic_rounding,
                grad_scale=scale,
                grad_factor=factor,
                found_inf=found_inf,
                steps_done=self._scalars.step(device, number) if number in counted else None,
                orthogonalization=read.orthogonalization,
            )
            hypers.append(hyper)
        return hypers


def _copied(value: Any) -> Any:
    """A copy of a list, which can be changed in place; any other value itself."""
    return list(value) if isinstance(value, list) else value


def _refuse(capturing: bool, reason: str) -> None:
    if capturing:
        raise RuntimeError(f"CUDA graph capture: {reason}; run one warm-up step or initialize_state() before capture")
