"""Orders of passes in which gradients of weights may wait, as ``torch.distributed.pipelining`` runs them.

Backward is in two passes: "values" gives gradients of values, which the stage before waits for, and "weights" those of
weights, for which nobody waits. ZB-H1 with several chunks, and ZBV (Qi et al., "Zero Bubble Pipeline Parallelism",
ICLR'24, sections 3 and 6); DualPipeV (DeepSeek-AI, github.com/deepseek-ai/DualPipe, 2025). Entry points:
``zero_bubble``, ``zbv`` and ``dualpipev``, each for one stage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import zip_longest

from pdv.schedule.passes import Pass


def zero_bubble(stage: int, forward: Sequence[Pass], backward: Sequence[Pass], ahead: int) -> tuple[Pass, ...]:
    """ZB-H1: 1F1B in which each stage keeps as many gradients of weights waiting as there are stages before it.

    forward, backward: the stage's passes in their order; ahead: forward passes before the first backward pass.
    """
    found, waiting = list(forward[:ahead]), deque[Pass]()
    for one, other in zip_longest(forward[ahead:], backward):
        found += [one] if one is not None else []
        found.append(other._replace(part="values"))
        waiting.append(other._replace(part="weights"))
        if len(waiting) > stage:
            found.append(waiting.popleft())
    return (*found, *waiting)


def zbv(stage: int, stages: int, micro_batches: int) -> tuple[Pass, ...]:
    """The second chunk's backward begins as soon as its forward is through; weights wait at the end alone."""
    writer, behind = _Writer(micro_batches), stages - stage
    first, second = stage, 2 * stages - 1 - stage
    for _ in range(2 * behind - 1):
        writer.forward(first)
    for _ in range(stage):
        writer.forward(second)
        writer.forward(first)
    for _ in range(behind):
        writer.forward(second)
        writer.apart(second)
    most = max(2 * stages - 1, micro_batches)  # those that there are not are left out in the end
    while writer.forwards[second] < writer.forwards[first] or writer.forwards[first] < most:
        if writer.forwards[first] < most:
            writer.forward(first)
        writer.apart(first)
        writer.forward(second)
        writer.apart(second)
    for _ in range(stage):
        writer.values(first)
        writer.values(second)
    for _ in range(behind):
        writer.values(first)
        writer.weights(first)
    writer.rest(second)
    writer.rest(first)
    return writer.found


def dualpipev(stage: int, stages: int, micro_batches: int) -> tuple[Pass, ...]:
    """Forward passes of each chunk take turns with backward passes of the other."""
    writer, behind = _Writer(micro_batches), stages - 1 - stage
    first, second = stage, 2 * stages - 1 - stage
    for _ in range(2 * behind):
        writer.forward(first)
    for _ in range(stage + 1):
        writer.forward(first)
        writer.forward(second)
    for _ in range(behind):
        writer.apart(second)
        writer.forward(second)
    for _ in range(micro_batches - 2 * stages + stage + 1):
        writer.forward(first)
        writer.backward(second)
        writer.forward(second)
        writer.backward(first)
    for _ in range(behind):
        writer.backward(second)
        writer.forward(second)
        writer.backward(first)
    half, odd = (stage + 1) // 2, stage % 2
    for turn in range(stage + 1):
        for chunk, late in ((second, turn >= half + 1 - odd), (first, turn >= half)):
            (writer.values if late else writer.backward)(chunk)
    for _ in range(behind):
        writer.weights()
        writer.values(first)
    writer.rest()
    return writer.found


class _Writer:
    """The passes of one stage, written one behind the other; each takes the next micro-batch of its chunk."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._taken: list[Pass] = []
        self._waiting: list[Pass] = []
        self.forwards, self.backwards = Counter[int](), Counter[int]()

    @property
    def found(self) -> tuple[Pass, ...]:
        """All of them."""
        return tuple(one for one in self._taken if one.micro_batch < self._micro_batches)

    def forward(self, chunk: int) -> None:
        """Forward."""
        self._taken.append(Pass(chunk, self.forwards[chunk]))
        self.forwards[chunk] += 1

    def backward(self, chunk: int) -> None:
        """Both halves of backward at once."""
        self._taken.append(Pass(chunk, self.backwards[chunk], backward=True))
        self.backwards[chunk] += 1

    def values(self, chunk: int) -> None:
        """The first half."""
        self.backward(chunk)
        whole = self._taken.pop()
        self._taken.append(whole._replace(part="values"))
        self._waiting.append(whole._replace(part="weights"))

    def weights(self, chunk: int | None = None) -> None:
        """The second half that waits longest, of a chunk or of any."""
        found = next((one for one in self._waiting if chunk in (None, one.chunk)), None)
        if found is not None:
            self._waiting.remove(found)
            self._taken.append(found)

    def apart(self, chunk: int) -> None:
        """Both halves, one behind the other."""
        self.values(chunk)
        self.weights(chunk)

    def rest(self, chunk: int | None = None) -> None:
        """All second halves that wait."""
        while any(chunk in (None, one.chunk) for one in self._waiting):
            self.weights(chunk)
