"""One turn of a pipeline's stage: ``Pass``."""

from __future__ import annotations

from typing import Literal, NamedTuple

Part = Literal["all", "values", "weights"]
"""Of a backward pass: gradients of values, which the stage before waits for, those of weights, or both."""


class Pass(NamedTuple):
    """A micro-batch through one chunk, forward or backward; chunks are numbered in the order of the model."""

    chunk: int
    micro_batch: int
    backward: bool = False
    part: Part = "all"
