"""In which formats a plan's products may be: the one that is fixed, or all that are allowed.

Nothing narrower than the type of compute is ever taken unasked.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.errors import UsageError, did_you_mean
from ir.graph import Graph
from pdv import config
from pdv.cluster import Device
from pdv.cluster.presets import record_peaks
from pdv.pcg.scaled import products_of
from pdv.pipelines.pinned import Pinned
from pdv.problem.formats import EMITTED_FORMATS, Format, Products
from pdv.problem.workload import IN_HALVES

ALLOWED = {"fp8": tuple(EMITTED_FORMATS)}
"""Formats by what allows them."""
DTYPE = "float8"
"""The rate that a cluster file gives of such units."""


def read_formats(
    products: str, allow: Sequence[str], mode: config.Mode, pinned: Pinned, graph: Graph, devices: Sequence[Device]
) -> tuple[Products | None, ...]:
    """Formats to search in, None for the type of compute alone.

    Allowed ones are left out where a device, or the program, has nothing to multiply in them.

    Raises:
        UsageError: if there is none of that name, or a fixed one does not go with the rest.
    """
    _check_names(products, allow)
    halves = pinned.schedule in IN_HALVES
    if products == config.PRODUCTS:
        names = [name for one in allow for name in ALLOWED[one]] if mode == "train" and not halves else []
        found = [_narrow(graph, EMITTED_FORMATS[name], devices, known=True) for name in dict.fromkeys(names)]
        return (None, *(one for one in found if isinstance(one, Products)))
    if mode != "train" or halves:
        what = "inference" if mode != "train" else f"schedule {pinned.schedule}, whose backward runs in halves"
        raise UsageError(f"products {products!r} with {what}", "They are of training", "Leave one of them out")
    only = _narrow(graph, EMITTED_FORMATS[products], devices, known=False)
    if isinstance(only, str):
        raise UsageError(f"products {products!r}: {only}", f"{config.PRODUCTS!r} always goes", "Leave --products out")
    return (only,)


def _check_names(products: str, allow: Sequence[str]) -> None:
    for name, known in ((products, [config.PRODUCTS, *EMITTED_FORMATS]), *((one, list(ALLOWED)) for one in allow)):
        if name not in known:
            allowed = f"Allowed: {', '.join(known)}"
            raise UsageError(f"no program is emitted with products in {name!r}", allowed, did_you_mean(name, known))
    if allow and products != config.PRODUCTS:
        raise UsageError(f"products are fixed to {products!r}, and {', '.join(allow)} allowed", "", "Leave one out")


def _narrow(graph: Graph, chosen: Format, devices: Sequence[Device], *, known: bool) -> Products | str:
    """A graph's products in a format, or why there are none; ``known``: of devices without a record nobody knows."""
    for device in devices:
        peaks = record_peaks(device.name)
        has = not known if peaks is None else chosen.peak in peaks
        if not (has or DTYPE in device.peak_flops or (device.kind == "cpu" and not known)):
            return f"{device.name} has no units for {chosen.peak}"
    found = products_of(graph, chosen)
    if not found.weights(graph):
        return f"no layer of {graph.name} multiplies by a trained matrix in bfloat16 (--dtype, --precision)"
    return found
