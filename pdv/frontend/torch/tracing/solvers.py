"""Code that solves triangular systems where it is not exported. Entry point: ``solving``.

Delta rules of transformers (Qwen3-Next, Qwen3.5, OLMo hybrid) build an inverse row by row, in 63 steps for each layer,
where they are exported: not all that an export is for can solve. Programs can, and are what the module itself runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

_SOLVES = "solve_triangular"
_BETWEEN = 2  # calls between such code and torch's own answer: a library's function that asks torch


@contextmanager
def solving() -> Iterator[None]:
    """While this lasts, code that may solve is told that it is not exported."""
    plain = torch.compiler.is_exporting

    def is_exporting() -> bool:
        return plain() and not _may_solve(sys._getframe(1))  # noqa: SLF001  # who asks

    torch.compiler.is_exporting = is_exporting
    try:
        yield
    finally:
        torch.compiler.is_exporting = plain


def _may_solve(frame: FrameType | None) -> bool:
    for _ in range(_BETWEEN):
        if frame is None:
            return False
        if _SOLVES in frame.f_code.co_names:
            return True
        frame = frame.f_back
    return False
