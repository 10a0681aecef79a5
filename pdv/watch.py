"""Following a search while it runs, and ending it early: what it tells, and what it asks. Entry point: ``Watch``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Standing:
    """How far a search is.

    Attributes:
        looked_at: how much it has looked at, in words: "mesh 2 of 5", "14 pipelines".
        best_s: seconds of a step of the best plan met, as this search prices it; None: it has met none.
        bound_s: what no plan of those looked at takes less than; None: nothing is known.
    """

    looked_at: str
    best_s: float | None = None
    bound_s: float | None = None

    @property
    def gap(self) -> float | None:
        """Share of the best plan's seconds that a better one could still save, among what was looked at."""
        if not self.best_s or self.bound_s is None:
            return None
        return max(0.0, (self.best_s - self.bound_s) / self.best_s)


def time_text(time_s: float) -> str:
    """A step's time: "104.2 ms", "26.51 s"."""
    return f"{time_s * 1e3:.4g} ms" if time_s < 10 else f"{time_s:.4g} s"


@dataclass(frozen=True)
class Watch:
    """Who follows a search, and may end it; by default nobody.

    Attributes:
        tell: called with each new standing.
        stopped: asked again and again; once it says True, the search ends with the best plan that it has, as it does
            when its budget is spent (before it has one, with the first).
    """

    tell: Callable[[Standing], None] = lambda standing: None
    stopped: Callable[[], bool] = lambda: False


UNWATCHED = Watch()
SEARCHING, SEARCHING_PIPELINES = "searching", "searching pipelines"
"""What progress calls the parts of planning that a watch follows."""
