"""The agreement of ranks on what a step sends, gradients and plans: made before anything is sent.

A gradient that is placed otherwise than its parameter, partial sums for one, is brought to its parameter's placements,
and whole matrices are put together of all ranks' gradients. Each rank begins these collectives because of the gradients
that it has, and of its options, param groups and order of parameters (``signature.py``). Where another rank
has others, both would wait for ever. Usually ranks have them alike, and then nothing is asked:

* Before the first step, or the first clipping, all ranks tell each other what they are going to send.
* Where a mesh has had gradients out of place, its ranks do so again each time; before each step, too, where some rank
  has no elements of a matrix, for which FSDP may leave it without a gradient.
* Elsewhere a rank that has something else to send than last time, or has planned its steps otherwise, asks the others,
  who ask, too, if they have. Where they do not within ``LIMIT``, it raises. Only a question in every step would let
  them know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.adapters import needs_collective
from fused_optim.backends import is_capturing
from fused_optim.options.checks import describe
from fused_optim.sharding.collective import (
    announce_on,
    differences,
    digest_of,
    gather_on,
    largest_on,
    meshes_of,
    some_ranks,
)
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.state.store import StateStore
from fused_optim.step.signature import CollectiveSignature, Entry, is_trained, signature_of

# Just before NCCL gives up by default: ranks may be minutes apart, after an evaluation on one of them.
LIMIT = timedelta(minutes=9)
_FAILED = [0, 0, 0, 0, 1, 0, 0]
_SHOWN = 3  # parameters that ranks have other facts of
_ELSEWHERE = "gradients: another rank refused its own, or has found that ranks have different ones; its error says why"


def is_misplaced(param: Tensor, grad: Tensor | None) -> bool:
    """True if a gradient is placed otherwise than its parameter."""
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return False
    return grad._spec is not param._spec and grad.placements != param.placements


class Misplaced(NamedTuple):
    """A gradient, and its parameter: ``key`` is the same on all ranks, ``text`` names the parameter."""

    key: str
    text: str


@dataclass
class CollectivesOfRank:
    """The collectives that this rank will start: its misplaced gradients, by mesh.

    ``gradients``: of the parameters that are whole matrices, whether they have one; None: no elements of it either.
    ``with_empty``: the meshes with such a parameter that this rank has no elements of. ``facts``: what else decides
    what is sent; empty: nothing is said of that.
    """

    misplaced: dict[DeviceMesh, list[Misplaced]] = field(default_factory=dict)
    gradients: dict[DeviceMesh, list[bool | None]] = field(default_factory=dict)
    with_empty: set[DeviceMesh] = field(default_factory=set)
    facts: Mapping[DeviceMesh, CollectiveSignature] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        names: Sequence[str | None] | None = None,
        facts: Mapping[DeviceMesh, CollectiveSignature] | None = None,
    ) -> CollectivesOfRank:
        """The collectives of some parameters' gradients, without whole matrices."""
        own = cls(facts=facts or {})
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                own.add(param, grad, index, None if names is None else names[index])
        return own

    @classmethod
    def of_all(cls, store: StateStore, every: bool = False) -> CollectivesOfRank:
        """The collectives of all gradients. ``every``: see :func:`fused_optim.step.signature.signature_of`."""
        own = cls.of(store.params, store.gradients(), store.names, signature_of(store, every=every))
        own.add_matrices(store)
        return own

    def add(self, param: Tensor, grad: Tensor, index: int, name: str | None = None) -> None:
        """Look at a gradient."""
        if isinstance(grad, DTensor) and is_misplaced(param, grad):
            placed = f"gradient with {list(grad.placements)}"
            misplaced = Misplaced(f"{tuple(param.shape)} {placed}", f"{describe(param, index, name)}: {placed}")
            self.misplaced.setdefault(grad.device_mesh, []).append(misplaced)

    def add_matrices(self, store: StateStore) -> None:
        """Look which parameters of whole matrices have gradients."""
        for param, rule in store.rules().items():
            if rule.whole_matrices and isinstance(param, DTensor) and is_trained(store, param):
                is_empty = not local_tensor(param).numel()
                has = True if store.has_gradient(param) else None if is_empty else False
                self.gradients.setdefault(param.device_mesh, []).append(has)
                if is_empty:
                    self.with_empty.add(param.device_mesh)


class Agreement:
    """The state of agreement on one optimizer's gradients: what its ranks have told each other. ``params`` lists them.

    ``is_first``: they have told each other nothing so far, and all of them do so now.
    """

    def __init__(self, params: Callable[[], Sequence[Tensor]], is_first: bool = True) -> None:
        self._params = params  # asked only where there is something to say
        self._is_first = is_first
        self._with_misplaced: set[DeviceMesh] = set()
        self._with_empty: set[DeviceMesh] = set()  # on some rank, as in `CollectivesOfRank`
        self._gradients: dict[DeviceMesh, list[bool | None]] = {}
        self._facts: Mapping[DeviceMesh, CollectiveSignature] = {}
        self.asks_in_each_step = True  # ranks tell each other before the next step, whatever this rank sends
        self.is_open = False  # a step has begun, in which others may ask this rank

    @property
    def is_first(self) -> bool:
        return self._is_first

    def abort(self) -> None:
        """This rank refuses the step before it has answered: let those who ask it raise."""
        if self.is_open and not is_capturing():
            self.is_open = False
            for mesh in self._with_misplaced | self._with_empty:
                announce_on(mesh, _FAILED)

    def check_alike(self, own: CollectivesOfRank, is_first: bool = False) -> None:
        """Raises RuntimeError where ranks would send different things, on all ranks that were asked.

        A collective over the meshes that the module's text names; nothing in a CUDA graph, before which all was said.
        ``is_first``: all ranks tell each other in any case.
        """
        self.is_open = False
        self._is_first |= is_first
        has_facts = (
            own.facts and own.facts is not self._facts and any(self._has_other_facts(mesh, own) for mesh in own.facts)
        )
        has_something_to_say = own.misplaced or has_facts or (own.gradients and self._must_ask_for_matrices(own))
        if own.facts and not has_facts:
            self._facts = own.facts
        if not (self._is_first or self._with_misplaced or has_something_to_say) or is_capturing():
            return
        error = None
        for mesh in meshes_of(self._params()):
            has_new = bool(own.misplaced.get(mesh)) or self._has_other_matrices(mesh, own)
            has_new = has_new or self._has_other_facts(mesh, own)
            is_asked = self._is_first or mesh in self._with_misplaced
            is_asked = is_asked or (mesh in self._with_empty and mesh in own.gradients)
            if is_asked or has_new:
                found = self._ask(mesh, own, None if is_asked else LIMIT, error is not None)
                error = error or found
        self._is_first = False
        self.asks_in_each_step = bool(self._with_misplaced)
        if error is not None:
            raise RuntimeError(error)
        self._facts = own.facts or self._facts

    def _must_ask_for_matrices(self, own: CollectivesOfRank) -> bool:
        return any(mesh in self._with_empty or self._has_other_matrices(mesh, own) for mesh in own.gradients)

    def _has_other_matrices(self, mesh: DeviceMesh, own: CollectivesOfRank) -> bool:
        return mesh in own.gradients and own.gradients[mesh] != self._gradients.get(mesh)

    def _has_other_facts(self, mesh: DeviceMesh, own: CollectivesOfRank) -> bool:
        if mesh not in own.facts:
            return False
        return mesh not in self._facts or own.facts[mesh].always != self._facts[mesh].always

    def _ask(self, mesh: DeviceMesh, own: CollectivesOfRank, limit: timedelta | None, has_failed: bool) -> str | None:
        """The difference between ranks as a text; None if there is none."""
        misplaced = own.misplaced.get(mesh, [])
        texts = [each.text for each in misplaced]
        digest = digest_of([each.key for each in misplaced])
        facts = own.facts.get(mesh)
        planned = 0 if facts is None else facts.digest(self._is_first)
        has_other, has_empty = self._has_other_matrices(mesh, own), mesh in own.with_empty
        numbers = [digest, -digest, planned, -planned, int(has_failed), int(has_other), int(has_empty)]
        try:
            largest, smallest, most, least, failed, others, empty = largest_on(mesh, numbers, limit)
        except RuntimeError as error:
            if limit is None:
                raise
            raise RuntimeError(_alone(texts, self._has_other_facts(mesh, own), limit)) from error
        if failed:
            return _ELSEWHERE
        if most != -least:
            return _otherwise_planned(mesh, facts, self._is_first)
        if largest != -smallest:
            return _different(texts)
        if texts:
            self._with_misplaced.add(mesh)
        if empty:
            self._with_empty.add(mesh)
        return self._ask_for_matrices(mesh, own.gradients.get(mesh, [])) if others else None

    def _ask_for_matrices(self, mesh: DeviceMesh, gradients: list[bool | None]) -> str | None:
        """``gradients``: of as many matrices on all ranks, as facts say."""
        found = largest_on(mesh, [int(has is kind) for kind in (True, False) for has in gradients])
        count = len(gradients)
        wrong = [i for i in range(count) if found[i] and found[count + i]]
        if wrong:
            lacking = sum(gradients[i] is False for i in wrong)
            return (
                f"{len(wrong)} parameters that are updated as whole matrices have gradients on some ranks only "
                f"({lacking} of them have none on this rank): set gradients, or None, on all ranks alike"
            )
        self._gradients[mesh] = list(gradients)
        return None


def agree_on_params(store: StateStore) -> None:
    """Before something is sent, outside of steps, of each parameter that needs it: a collective where some do.

    Raises RuntimeError on all ranks where they have other parameters, or the same ones in another order.
    """
    concerned = [param for param in store.params if needs_collective(param)]
    if concerned:
        Agreement(lambda: concerned).check_alike(CollectivesOfRank(facts=signature_of(store)))


def _different(texts: Sequence[str]) -> str:
    return (
        "gradients are placed otherwise than their parameters, and not alike on all ranks, which would wait for each "
        f"other. On this rank: {_listed(texts)}"
    )


def _otherwise_planned(mesh: DeviceMesh, facts: CollectiveSignature | None, is_first: bool) -> str:
    """The differing options or parameters as a text. A collective over a mesh whose ranks found a difference."""
    entries: Sequence[Entry] = () if facts is None else facts.entries
    (count,) = largest_on(mesh, [len(entries)])
    digests = [digest_of(entry.texts(is_first)) for entry in entries] + [0] * (count - len(entries))
    found = largest_on(mesh, [*digests, *(-digest for digest in digests)])
    differing = [i for i in range(count) if found[i] != -found[count + i]]
    shown = differing[:_SHOWN]
    own = {i: (entries[i].who, entries[i].texts(is_first)) for i in shown if i < len(entries)}
    given = gather_on(mesh, (own, {} if facts is None else facts.options))
    who_by_text: dict[str, list[str]] = {}
    for i in shown:
        of_ranks = {rank: each[i] for rank, (each, _) in given.items() if i in each}
        who = own[i][0] if i in own else next(iter(of_ranks.values()))[0]
        lacking = [rank for rank in given if rank not in of_ranks]
        text = f"not on {some_ranks(lacking)}" if lacking else ""
        text = text or differences({rank: texts for rank, (_, texts) in of_ranks.items()})
        who_by_text.setdefault(text, []).append(who)
    texts = [f"{text} ({', '.join(who)})" for text, who in who_by_text.items()]
    if len(differing) > _SHOWN:
        texts.append(f"{len(differing) - _SHOWN} more parameters")
    if options := differences({rank: options for rank, (_, options) in given.items()}):
        texts.append(f"options: {options}")
    hint = "give all ranks of a mesh the same ones, in one order"
    return f"ranks have other options, param groups or parameters than others: {'; '.join(texts)}; {hint}"


def _alone(texts: Sequence[str], is_planned_otherwise: bool, limit: timedelta) -> str:
    if is_planned_otherwise:
        return (
            "options, param groups or trained parameters were changed since the step before, and other ranks have not "
            f"said the same within {limit.total_seconds():g} s: change them on all ranks alike"
        )
    what = f"placed otherwise than their parameters ({_listed(texts)})" if texts else "there, or missing, for matrices"
    return (
        f"gradients are {what}, which was not so in the steps before, and other ranks have not said the same within "
        f"{limit.total_seconds():g} s: let all ranks have gradients alike"
    )


def _listed(texts: Sequence[str]) -> str:
    return "; ".join([*texts[:3], *([f"{len(texts) - 3} more"] if len(texts) > 3 else [])]) or "none"
