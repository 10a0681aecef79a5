"""The one place where defaults are written. Each is a constant with the reason for its value."""

from __future__ import annotations

from typing import Literal

VERSION = "0.1.0"
Mode = Literal["train", "infer"]
Pipelines = Literal["never", "where-needed", "always"]

MODE: Mode = "train"
PRECISION = "as-emitted"  # parameters, gradients and moments in the type of compute
PRODUCTS = "own"  # those of layers in the type of compute
OFFLOAD = "none"  # the optimizer on the devices
SEARCH = "backtrack"
PIPELINES: Pipelines = "always"  # of all plans the one whose simulated step is shortest
MAX_MESH_AXES = 2  # nodes and devices; a mesh of three axes takes seconds more, and there are many: pin one to get it
UNIFORM_GAP = 1e-3  # of a step, paid at most for equal layers to do alike: predictions err by 5 % and more
REWRITE_GAIN = (
    5e-3  # of a block's seconds, that a rewrite saves at least: what errors of prices make is not read for it
)
BUDGET_S = 60.0  # planning time after which the best plan so far is taken; GPT-2 needs a tenth of it
CACHE_BYTES = 256 << 20  # of searches kept: a search takes some 10 kB, of the largest models 300 kB
CACHE_S = 90 * 86400.0  # after which a search is forgotten: the code that made it has changed since
MAX_TABLE_BYTES = 1 << 28  # of one table of the search: what would be larger is bounded, split or refused instead
ANALYTIC = "analytic"
AUTO = "auto"
COSTS = (AUTO, ANALYTIC, "learned", "measured")
COST = AUTO  # what prices kernels (docs/decisions/0020)
