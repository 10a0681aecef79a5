"""The nearest known name to a mistaken one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` for the nearest of `known`, or nothing when none is near."""
    near = difflib.get_close_matches(wrong, sorted(known), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else ""
