"""Other searches on the same problem, so that they can be compared; each has one file and cites its paper.

``backtrack`` is the default and the only one that searches algebraic rewrites with the splits; the others solve the
splits of the graph as it was written. All but it work on one flat network (``network``) and handle memory alike
(``pricing``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.bayes import bayes
from pdv.search.strategies.budget import Budget, Strategy
from pdv.search.strategies.dp import dp
from pdv.search.strategies.gradient import gradient
from pdv.search.strategies.ilp import ilp
from pdv.search.strategies.mcmc import mcmc
from pdv.search.strategies.reinforce import reinforce

STRATEGIES: Mapping[str, Strategy] = {
    "backtrack": backtrack,
    "mcmc": mcmc,
    "ilp": ilp,
    "dp": dp,
    "gradient": gradient,
    "reinforce": reinforce,
    "bayes": bayes,
}

__all__ = ["STRATEGIES", "Budget", "Strategy"]
