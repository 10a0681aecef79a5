"""What selective recomputation keeps of a layer, and what runs again. Entry points: `kept_operators`, `run_again`."""

from __future__ import annotations

from collections.abc import Sequence

from ir.operator import Operator

WHOLE = ("full", "full-hosted", "alternate")
HOSTED = ("hosted", "full-hosted")
SELECTIVE = ("operators", "elementwise", "offload")


def kept_operators(run: Sequence[Operator], recompute: str) -> frozenset[int]:
    """Places of the operators of a layer whose results are kept until its backward.

    By "operators": attention, every second product, beginning with the first, and sums that are scattered (torchtitan,
    distributed/activation_checkpoint.py, ``_get_custom_policy``). By "elementwise": attention and products whose result
    some gradient reads: not those that are only added.
    """
    kept, products = set(), 0
    for place, op in enumerate(run):
        if op.has_scores or (recompute == "operators" and op.kind == "parallel" and op.transition.sums):
            kept.add(place)
        elif op.kind == "contraction":
            products += 1
            if products % 2 if recompute == "operators" else _is_read(run[place + 1 :]):
                kept.add(place)
    return frozenset(kept)


def run_again(run: Sequence[Operator], recompute: str) -> frozenset[int]:
    """Places of the operators of a layer that run again before its backward."""
    if recompute in WHOLE:
        return frozenset(range(len(run)))
    if recompute == "selective":
        return frozenset(place for place, op in enumerate(run) if op.has_scores)
    if recompute == "operators":
        return frozenset(range(len(run))) - kept_operators(run, recompute)
    cheap = {place for place, op in enumerate(run) if op.kind in {"map", "row"} and not op.has_scores}
    return frozenset(cheap if recompute in SELECTIVE else ())


def runs_again(layer: int, recompute: str) -> bool:
    """Whether anything of a layer runs again before its backward."""
    return recompute != "alternate" or layer % 2 == 1


def _is_read(later: Sequence[Operator]) -> bool:
    """Whether the next kernel behind a product keeps what it reads."""
    reader = next((op for op in later if op.kernel), None)
    return reader is None or bool(reader.saved)
