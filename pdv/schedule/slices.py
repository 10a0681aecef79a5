"""What micro-batches that pass in slices of time do not go together with. Entry point: ``why_not_in_slices``."""

from __future__ import annotations

from pdv.problem import Problem
from pdv.problem.workload import Order

SLICED: Order = "1f1b"
"""The order of passes that slices have."""
ASKED = (
    f"Slices pass stages of a pipeline, one on each rank, in the order {SLICED}, in training; with parameters, "
    "activations and products that are kept and computed as the model has them, and without dropout"
)


def why_not_in_slices(problem: Problem, order: Order, ranks: int, each: int, count: int, *, leaves: bool) -> str:
    """Why micro-batches cannot pass in so many slices on so many ranks, ``each`` with so many stages; "" if they can.

    leaves: whether layers let go of what they keep for backward: slices behind read it.
    """
    kept = problem.precision
    reasons = {
        f"{count} slices": count < 2,
        "inference": not problem.train,
        "no pipeline": ranks < 2,
        f"the order {order}": order != SLICED,
        f"{each} stages on each rank": each != 1,
        "recomputation, or activations on the host": leaves,
        "master weights": bool(kept.master),
        "the optimizer in the host's memory": kept.on_host,
        "products in a narrower format": problem.products is not None,
        "dropout": problem.graph.draws > 0,
    }
    found = [name for name, holds in reasons.items() if holds]
    return f"slices with {', '.join(found)}" if found else ""
