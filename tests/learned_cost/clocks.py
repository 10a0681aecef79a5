"""Clocks that a test turns: what reads times is tested for what it makes of them, not for how loaded a machine is."""

from __future__ import annotations


class Clocks:
    """Stands for the module ``time`` where a test says how long things take, in seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        self._used = 0.0

    def work(self, seconds: float) -> None:
        """The process runs for so long."""
        self._now += seconds
        self._used += seconds

    def wait(self, seconds: float) -> None:
        """Others run for so long."""
        self._now += seconds

    def monotonic(self) -> float:
        return self._now

    perf_counter = monotonic

    def process_time(self) -> float:
        return self._used
