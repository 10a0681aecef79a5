"""An edited text beside the one that was emitted.

The run against the source is in evaluation, in float64, of one micro-batch, on the plan's mesh. An edit may be wrong
in training alone (masks of dropout), in its own types, where the batch has parts, on one process, at ids that are
padding, or in what is not run at all: of each there is a run here, in which the emitted text says what is right.
Entry point: ``check_edits``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ir.errors import VerificationError
from ir.mesh import Mesh
from ir.views import sources_of
from pdv.check.compare import Comparison, errors_of, relative_error
from pdv.check.edits.lines import Reached, check_reached, reached_in
from pdv.check.imports import Arrays, Texts
from pdv.check.reference import Given, NotFiniteError, expected_of, largest, reference
from pdv.check.run import observe, on_ranks, run, train_as_built
from pdv.check.small import Pair

_ROUNDING = 1e-7  # of a tensor's largest element, in float64: an edit may take a sum in another order
_OWN_ROUNDING = 1e-5  # in types of its own, beside what the emitted text has
_TIMES = 16  # so much of the emitted text's rounding an edited one may have
_NORM = 1e-3  # to which gradients are clipped
_FREE = {"check_every", "own_loss", "micro_batches"}  # what users set, and what a step of one and of many shows

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


def check_edits(pair: Pair, emitted: Texts, edited: Texts, *, train: bool) -> None:
    """Whether an edited text, which gives what the source does, also does what the emitted one does besides.

    Raises:
        VerificationError: naming what differs, or an edit that no run reaches.
    """
    old, new = Reached(), Reached()
    seen = _Beside(pair, emitted, edited, train, old, new)
    seen.check_alone()
    seen.check_special_ids()
    seen.check_training()
    seen.check_own_types()
    for name, text in edited.files.items():
        before = emitted.files.get(name, "")
        if text != before:
            ran = (reached_in(one, texts.directory, [name])[name] for one, texts in ((old, emitted), (new, edited)))
            taken, put = next(ran), next(ran)
            if put or name in emitted.files:  # else nothing imports it
                check_reached(name, before, text, (taken, put), edited.directory)


class _Beside:
    """The runs; what the texts reach of themselves is noted."""

    def __init__(self, pair: Pair, emitted: Texts, edited: Texts, train: bool, old: Reached, new: Reached) -> None:
        self._pair, self._emitted, self._edited, self._train = pair, emitted, edited, train
        self._old, self._new = old, new
        self._given, _ = reference(pair, train=train, seed=0)
        self._stored: Arrays = {**self._given.stored, **pair.own_tensors(self._given.stored)}

    def check_alone(self) -> None:
        """On one process, and on all, where an edit is seen in evaluation."""
        alone = replace(self._pair, mesh=Mesh.of(**{axis.name: 1 for axis in self._pair.mesh.axes}))
        with self._new.noted(self._edited.directory), self._old.noted(self._emitted.directory):
            observe(self._pair, self._edited, self._stored, self._given, train=self._train)
            observe(self._pair, self._emitted, self._stored, self._given, train=self._train)
        try:
            with self._new.noted(self._edited.directory):
                run(alone, self._edited, train=self._train)
        except VerificationError as error:
            if self._is_right(alone, self._emitted, self._given):
                raise VerificationError(f"on one process {error.what}", error.allowed, check="text") from error

    def check_special_ids(self) -> None:
        """At rows that are all padding, and at numbers with which the source compares integers."""
        for given in _special(self._pair, self._given):
            if self._is_right(self._pair, self._emitted, given):
                wanted = expected_of(self._pair, given, train=self._train)
                found = observe(self._pair, self._edited, self._stored, given, train=self._train)
                where = "at rows of one id, such as padding, "
                Comparison(self._pair, given, wanted, _ROUNDING, where).worst([first for first, _ in found])

    def _is_right(self, pair: Pair, texts: Texts, given: Given) -> bool:
        with np.errstate(all="ignore"):
            try:
                wanted = expected_of(pair, given, train=self._train)
                if not wanted.is_finite:
                    return False
                found = observe(pair, texts, self._stored, given, train=self._train)
                Comparison(pair, given, wanted, _ROUNDING).worst([first for first, _ in found])
            except (VerificationError, NotFiniteError, LookupError, ValueError):
                return False
        return True

    def check_training(self) -> None:
        """As it is built: in training, in the plan's micro-batches, with gradients clipped, and what it says it is."""
        look = partial(train_as_built, pair=self._pair, given=self._given, train=self._train, norm=_NORM)
        try:
            with self._old.noted(self._emitted.directory):
                wanted = on_ranks(self._pair.mesh.num_devices, self._emitted, self._stored, look)
        except VerificationError:  # at these sizes there is nothing to compare with
            return
        with self._new.noted(self._edited.directory):
            found = on_ranks(self._pair.mesh.num_devices, self._edited, self._stored, look)
        for rank, (right, its) in enumerate(zip(wanted, found, strict=True)):
            where = f"in training, on simulated rank {rank} of {self._pair.mesh}"
            for name, value in right.said.items():
                if name not in _FREE and its.said.get(name) != value:
                    raise _differs(f"model.{name} is {its.said.get(name)!r}, of the plan {value!r}", where)
            if missing := sorted(right.values.keys() ^ its.values.keys()):
                raise _differs(f"{missing[0]} is there in one of the edited and the emitted text alone", where)
            reached = max(map(largest, right.values.values()), default=1.0)
            for name, value in right.values.items():
                if not (gap := _gap(its.values[name], value, reached)) <= _ROUNDING:
                    raise _differs(f"{name} differs from that of the emitted text by {gap:.1e}", where)

    def check_own_types(self) -> None:
        """In the types of the plan, where the emitted text runs in them on a CPU."""
        kinds = {source: node.type.dtype for node in self._pair.source.params for source in sources_of(node)}
        stored: dict[str, Any] = {}
        for name, x in self._stored.items():
            tensor = torch.as_tensor(x)
            kind = kinds[name].torch_name if name in kinds else "float32"
            stored[name] = tensor.to(getattr(torch, kind)) if tensor.is_floating_point() else tensor

        def gaps(texts: Texts) -> dict[str, float]:
            found = observe(self._pair, replace(texts, own_types=True), stored, self._given, train=self._train)
            wanted = expected_of(self._pair, self._given, train=self._train)
            return errors_of(Comparison(self._pair, self._given, wanted), [first for first, _ in found])

        try:
            plain = gaps(self._emitted)
        except VerificationError:
            return
        usual = float(np.median(list(plain.values()) or [0.0]))
        for what, gap in gaps(self._edited).items():
            own = max(plain.get(what, 0.0), usual)  # of a gradient that is zero all is rounding, of that one alone
            if math.isfinite(own) and not gap <= _TIMES * own + _OWN_ROUNDING:
                raise _differs(f"{what} is rounded by {gap:.1e} of its largest element", f"else by {own:.1e}")


def _special(pair: Pair, given: Given) -> Iterator[Given]:
    """Integers that are one number in the last row, and in every third place, for each number of the source's."""
    numbers = {0}
    for node in pair.source.nodes:
        if "relation" in node.attrs and not node.operands[0].type.dtype.is_floating:
            numbers.add(int(node.attr("number")))
    integers = [node.attr("name") for node in pair.source.inputs if given.inputs[node.attr("name")].dtype.kind == "i"]
    for name in integers:
        for number in sorted(numbers):
            x = given.inputs[name].copy()
            if x.ndim and x.size > 1:
                x.reshape(-1)[::3] = number
                x[-1] = number
                yield replace(given, inputs={**given.inputs, name: x})


def _gap(found: Array, wanted: Array, reached: float) -> float:
    if found.shape != wanted.shape or found.dtype.kind != wanted.dtype.kind:
        return math.inf
    if wanted.dtype.kind == "f":  # no number is right where the emitted text has none
        either = ~(np.isnan(found) & np.isnan(wanted))
        found, wanted = found[either], wanted[either]
    return relative_error(found, wanted, reached)


def _differs(what: str, where: str) -> VerificationError:
    allowed = "What the emitted text does, in training and in the types of the plan, too"
    return VerificationError(f"of the edited text, {what}, {where}", allowed, check="text")
