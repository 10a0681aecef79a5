"""n simulated ranks in one process: threads of which one runs at a time, from one collective to the next.

Ranks that call collectives in different orders, or with tensors that do not fit together, are an error that names
them; so is a rank that waits for ones that never come. Nothing hangs, and every run takes the same turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
_STACK_BYTES = 64 << 20  # backward of a deep program recurses


class CollectiveError(Exception):
    """Collectives of several ranks that do not fit together."""


class RankError(Exception):
    """A rank that failed, with its number and what it raised (the cause)."""

    def __init__(self, rank: int, cause: BaseException) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.__cause__ = cause


class _AbandonedError(BaseException):
    """Raised where a rank waits, once another has failed."""


@dataclass(frozen=True)
class Group:
    """Ranks that meet, in order; ``name`` is for messages."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective.

    Attributes:
        name: which one.
        same: what all ranks of the group must agree in.
        tensors: what is read and written.
    """

    name: str
    same: Hashable
    tensors: tuple[Tensor, ...]


Carry = Callable[[Sequence[Call]], None]
"""Does a collective: writes the results of the calls, which are in the group's order."""


@dataclass
class _Meeting:
    group: Group
    calls: dict[int, Call] = field(default_factory=dict)


class World(Generic[T]):
    """``World(n).run(worker)`` is ``[worker(0), ..., worker(n - 1)]``, where workers may ``meet``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Lock() for _ in range(size)]  # a rank whose lock is released runs
        self._ready = [True] * size
        self._done = [False] * size
        self._open: dict[Group, _Meeting] = {}
        self._results: list[Any] = [None] * size
        self._failure: RankError | None = None
        self._finished = threading.Event()

    def run(self, worker: Callable[[int], T]) -> list[T]:
        """Every rank's result.

        Raises:
            RankError: of the rank that failed first.
        """
        for turn in self._turns:
            turn.acquire()
        before = threading.stack_size(_STACK_BYTES)
        try:
            threads = [threading.Thread(target=self._body, args=(worker, rank)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._turns[0].release()
        self._finished.wait()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results

    def meet(self, group: Group, rank: int, call: Call, carry: Carry) -> None:
        """Wait for the group's other ranks; the last to come carries out what they called.

        Raises:
            CollectiveError: if ranks call different things, or one never comes.
        """
        meeting = self._open.setdefault(group, _Meeting(group))
        for other, first in meeting.calls.items():
            if (first.name, first.same) != (call.name, call.same):
                raise CollectiveError(
                    f"over {group.name}, rank {rank} calls {call.name} {_describe_calls(call.same)}, "
                    f"but rank {other} {first.name} {_describe_calls(first.same)}"
                )
        meeting.calls[rank] = call
        if len(meeting.calls) == len(group.ranks):
            del self._open[group]
            carry([meeting.calls[member] for member in group.ranks])
            for member in group.ranks:
                self._ready[member] = True
            return
        self._ready[rank] = False
        self._pass_on(rank)
        self._turns[rank].acquire()
        if self._failure is not None:
            raise _AbandonedError

    def _body(self, worker: Callable[[int], T], rank: int) -> None:
        self._turns[rank].acquire()
        try:
            if self._failure is None:
                self._results[rank] = worker(rank)
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  # whatever it is, who started the ranks shall see it
            self._failure = self._failure or RankError(rank, error)
        self._done[rank] = True
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can run; all can once one has failed."""
        for _ in range(2):
            for step in range(1, self.size + 1):
                other = (rank + step) % self.size
                if not self._done[other] and (self._ready[other] or self._failure is not None):
                    self._turns[other].release()
                    return
            if all(self._done):
                self._finished.set()
                return
            self._failure = RankError(self._done.index(False), CollectiveError(self._standstill()))

    def _standstill(self) -> str:
        waits = []
        for meeting in self._open.values():
            (name,) = {call.name for call in meeting.calls.values()}
            missing = [member for member in meeting.group.ranks if member not in meeting.calls]
            done = " (finished)" if all(self._done[member] for member in missing) else ""
            waits.append(f"{_ranks(meeting.calls)} in {name} over {meeting.group.name} for {_ranks(missing)}{done}")
        return f"ranks wait for one another: {'; '.join(waits)}"


def _ranks(ranks: Any) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _describe_calls(same: Hashable) -> str:
    return f"({', '.join(map(str, same))})" if isinstance(same, tuple) else str(same)
