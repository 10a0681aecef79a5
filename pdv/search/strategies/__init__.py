"""Other searches on the same problem, so that they can be compared; each has one file and cites its paper.

``backtrack`` is the default and the only one that searches algebraic rewrites with the splits; the others solve the
splits of the graph as it was written. All but it work on one flat network (``network``) and handle memory alike
(``pricing``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget, Strategy

STRATEGIES: Mapping[str, Strategy] = {
    "backtrack": backtrack,
}

__all__ = ["STRATEGIES", "Budget", "Strategy"]
