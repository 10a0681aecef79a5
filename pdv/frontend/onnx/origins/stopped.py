"""Which gradients a module stops, as far as torch's newer exporter says it beside a node; ONNX has no word for it.

Entry points: ``padding_of``, ``is_detached``.
"""

from __future__ import annotations

import onnx_ir

from pdv.frontend.lowering import Unsupported
from pdv.frontend.onnx.origins.signature import call_of

_PADDING, _BY_FREQUENCY = 2, 3  # arguments of torch's embedding


def padding_of(node: onnx_ir.Node) -> int:
    """The row of an embedding's table that takes no gradient; negative where there is none, or the file is silent.

    Raises:
        Unsupported: if the gradients of rows are divided by how often they are read.
    """
    name, given = call_of(node)
    if name != "embedding":
        return -1
    if given[_BY_FREQUENCY:][:1] == ["True"]:
        raise Unsupported("gradients of rows divided by how often they were read")
    return int(given[_PADDING]) if len(given) > _PADDING else -1


def is_detached(node: onnx_ir.Node) -> bool:
    """Whether an identity is where a module stops a gradient."""
    return call_of(node)[0] in ("detach", "detach_")
