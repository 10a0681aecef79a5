"""The one place where defaults are written. Each is a constant with the reason for its value."""

from __future__ import annotations

from typing import Literal

Mode = Literal["train", "infer"]

MODE: Mode = "train"
SEARCH = "backtrack"
MAX_MESH_AXES = 2  # nodes and devices; a mesh of three axes takes seconds more, and there are many: pin one to get it
BUDGET_S = 60.0  # planning time after which the best plan so far is taken; GPT-2 needs a tenth of it
ANALYTIC = "analytic"
COSTS = (ANALYTIC, "learned", "measured")
COST = ANALYTIC  # what prices kernels (docs/decisions/0010)
SIMULATED_COST = "learned"  # what prices a configuration of the user's own (docs/decisions/0014)
