"""Subgraphs compiled by inductor, and the same run operator by operator.

The compiler is called on the graph itself: a training step passes the guards of ``torch.compile`` once, not per
subgraph. Its cache keeps what was compiled (TORCHINDUCTOR_CACHE_DIR), so that a resumed run, or one on a machine that
is quiet only for minutes, need not compile again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ir.graph import Graph
from learned_cost.data.kernel import Subgraph
from learned_cost.profile.programs.subgraphs import callable_of, described, inputs_of


def compiled(graph: Graph, device: torch.device) -> tuple[Subgraph, Callable[[], Any]]:  # Any: results are dropped
    """The graph fused: what it is, and a call that runs it on operands of its own."""
    from torch._inductor.compile_fx import compile_fx

    operands = inputs_of(graph, device)
    with torch.no_grad():
        run: Any = compile_fx(callable_of(graph), operands)  # Any: typed as more than a callable
    return described(graph, fused=True, stack="inductor"), _without_gradient(run, operands)


def eager(graph: Graph, device: torch.device) -> tuple[Subgraph, Callable[[], Any]]:  # Any: as above
    """The graph operator by operator."""
    return described(graph, fused=False, stack="torch"), _without_gradient(callable_of(graph), inputs_of(graph, device))


def _without_gradient(run: Callable[..., Any], operands: list[torch.Tensor]) -> Callable[[], Any]:  # Any: as above
    def call() -> Any:
        with torch.no_grad():
            return run(*operands)

    return call
