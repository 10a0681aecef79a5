"""Where a module stops gradients: `detach`, and what runs under `torch.no_grad`.

`run_decompositions` inlines regions without gradient and forgets that they were; `stopped_gradients` leaves a detach
behind each of their results, which a lowering finds.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.export import ExportedProgram

DETACHES = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


@contextmanager
def stopped_gradients(program: ExportedProgram) -> Iterator[None]:
    """While this lasts, results of regions without gradient are detached in the program's own graph."""
    made: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    names: dict[str, str] = {}
    for node in list(program.graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in [user for user in node.users if user.target is operator.getitem]:
                with program.graph.inserting_after(result):
                    detached = program.graph.call_function(DETACHES[0], (result,))
                detached.meta = dict(result.meta)
                result.replace_all_uses_with(detached, delete_user_cb=lambda user, new=detached: user is not new)
                made.append((result, detached))
                names[result.name] = detached.name
    _rename_outputs(program, names)
    try:
        yield
    finally:
        for result, detached in made:
            detached.replace_all_uses_with(result)
            program.graph.erase_node(detached)
        _rename_outputs(program, {new: old for old, new in names.items()})


def _rename_outputs(program: ExportedProgram, names: dict[str, str]) -> None:
    for spec in program.graph_signature.output_specs:
        name = getattr(spec.arg, "name", None)
        if name in names:
            spec.arg.name = names[name]
