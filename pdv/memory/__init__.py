"""How much memory a step needs, by lifetime: peaks, when they are, and who holds them. Entry point: `step_memory`."""

from __future__ import annotations

from pdv.memory.log import Holder
from pdv.memory.step import KnownPasses, Point, StageMemory, StepMemory, needed_bytes, step_memory

__all__ = ["Holder", "KnownPasses", "Point", "StageMemory", "StepMemory", "needed_bytes", "step_memory"]
