"""What layers keep for backward, in the host's memory in between, as the emitted ``on_host`` has it.

A device has that of the layer at work and of one more. Entry point: ``Hosting``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pdv.memory.log import Heap, Holder, Storage

ON_HOST = Holder("activations", "on the host")


class Hosting:
    """Of one pass. on_host: bytes of the host at the end of forward; a CPU's are on the heap."""

    def __init__(self, heap: Heap, *, on_gpu: bool) -> None:
        self.on_host = 0.0
        self._heap, self._on_gpu = heap, on_gpu
        self._here: deque[int] = deque()
        self._lists: dict[int, Sequence[list[Storage]]] = {}
        self._away: dict[int, list[Storage]] = {}
        self._copies: dict[int, Storage] = {}

    def send(self, layer: int, lists: Sequence[list[Storage]]) -> None:
        """What a layer keeps, by who holds it."""
        size = sum(one.num_bytes for one in {one for held in lists for one in held if _leaves(one)})
        self._copies[layer] = self._heap.allocate(0.0 if self._on_gpu else size, ON_HOST)
        self.on_host += size if self._on_gpu else 0.0
        self._lists[layer] = lists
        self._here.append(layer)

    def let_go(self, kept: int) -> None:
        """All but so many layers: who held memory of the device holds what is to be there again."""
        while len(self._here) > kept:
            layer = self._here.popleft()
            away: dict[Storage, Storage] = {}
            for held in self._lists[layer]:
                for place, storage in enumerate(held):
                    if not _leaves(storage):
                        continue
                    known = away.get(storage)
                    if known is None:
                        known = away[storage] = Storage(storage.num_bytes, storage.holder, 0)
                    known.references += 1
                    held[place] = known
                    self._heap.drop(storage)
            self._away[layer] = list(away.values())

    def fetch(self, layer: int) -> None:
        """That of a layer, if it was sent, and of the one before it."""
        layers = list(self._lists)
        if layer in self._lists:
            at = layers.index(layer)
            for one in layers[max(0, at - 1) : at + 1]:
                for storage in self._away.pop(one, ()):
                    self._heap.log.add(storage.num_bytes, storage.holder, self._heap.moment)

    def forget(self, layer: int) -> None:
        """Behind backward of a layer: its copy."""
        if layer in self._copies:
            self._heap.drop(self._copies.pop(layer))


def _leaves(storage: Storage) -> bool:
    """Whether it is sent: what came from another stage is held until its gradient goes back."""
    return storage.holder.kind != "pipeline"
