"""Buckets of gradients, and which gradients fill them: ``Bucket``, ``Triggers``.

What autograd calls in Python for each gradient finds nothing of it in a CPU's caches, behind products that filled them:
40 us, and of a small ViT's step 2 %. Steps give leaves their gradients in one order, and in the next one only those
that fill a bucket call back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdv.emit.templates.parallel import all_reduce_steps
from pdv.emit.templates.stored import join_flat

if TYPE_CHECKING:
    from pdv.emit.templates.gradients import Leaf


@dataclass(eq=False)
class Bucket:
    """Contributions of one type, to be summed over the same axes."""

    leaves: list[Leaf] = field(default_factory=list)
    num_bytes: int = 0
    flat: Tensor | None = None
    steps: Iterator[bool] = field(default_factory=lambda: iter(()))
    is_quick: bool = False  # whether what it waits for now is soon done, and more has to be started then

    def start(self, flats: list[Tensor]) -> None:
        """Start to sum what the leaves hold, which they give away; see ``join_flat``."""
        self.flat = join_flat([leaf.take().reshape(-1) for leaf in self.leaves], flats)
        self.steps = all_reduce_steps(self.flat, [axis.of_sums for axis in self.leaves[0].axes])
        self.advance()

    def advance(self) -> bool:
        """Wait for the collective that runs, and start the next; False if there is none."""
        self.is_quick = bool(quick := next(self.steps, None))
        return quick is not None

    def pieces(self) -> Iterator[tuple[Leaf, Tensor]]:
        """The sum for each leaf, as a view."""
        assert self.flat is not None, "started"
        parts = torch.split(self.flat, [leaf.tensor.numel() for leaf in self.leaves])
        for leaf, part in zip(self.leaves, parts, strict=True):
            yield leaf, part.view(leaf.tensor.shape)


class Triggers:
    """Leaves whose gradients filled buckets in the last step, and those whose gradients were there by then."""

    def __init__(self) -> None:
        self._leaves: list[Leaf] = []  # of the model, then
        self._known: list[tuple[bool, list[Leaf]]] = []  # bucket by bucket: whether it was filled, and by what
        self._noted: list[tuple[bool, list[Leaf]]] | None = None  # of this pass; None outside of ``of_pass``
        self._before: dict[Leaf, list[Leaf]] = {}

    def note(self, leaves: Sequence[Leaf], *, is_full: bool) -> None:
        """These fill a bucket, or are what is left at the end."""
        if self._noted is not None:
            self._noted.append((is_full, [*leaves]))

    def before(self, leaf: Leaf) -> Sequence[Leaf]:
        """Those of a leaf's bucket that did not call back."""
        return self._before.get(leaf, ())

    @contextmanager
    def of_pass(self, leaves: list[Leaf]) -> Iterator[None]:
        """Context of a backward pass: of the ``leaves`` only those call back that filled a bucket in the last one.

        Behind one that gives gradients otherwise, all call back in the next.
        """
        known = self._known if leaves == self._leaves else []
        self._before = {each[-1]: each[:-1] for is_full, each in known if is_full}
        quiet = [leaf for leaf in leaves if leaf not in self._before] if known else []
        noted: list[tuple[bool, list[Leaf]]] = []
        self._noted = noted
        hooks = [leaf.tensor._post_accumulate_grad_hooks for leaf in quiet]  # noqa: SLF001
        calls = [dict(each) for each in hooks]
        for each in hooks:
            each.clear()
        try:
            yield
            is_other = bool(known) and noted != known
            self._leaves, self._known = ([], []) if is_other else ([*leaves], noted)
        finally:
            for each, those in zip(hooks, calls, strict=True):
                each.update(those)
            self._noted, self._before = None, {}
