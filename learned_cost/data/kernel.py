"""One measured, or to be predicted, piece of work: a kernel, and a fused subgraph of kernels.

A ``Kernel`` is a row of a profile (docs/profiles.md) without its measurement: the columns are the same, so what a
profiler wrote, what public data says and what the search asks are one format. Sizes are local, of one device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The sizes that an operator may have, as columns of a profile; what each means by operator is in docs/profiles.md.
DIMS = (
    "b", "m", "n", "k", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "window", "hidden", "inter", "topk",
    "experts", "tp", "ep", "c_in", "c_out", "ksize", "img", "stride", "pad",
)  # fmt: skip

# Roles of a loop: in the result; summed over; taken whole by a row function; moving over a stencil.
ROLES = ("parallel", "contracted", "whole", "stencil")

FUSED = "subgraph"  # the ``op`` of a row that measures a fused subgraph, its nodes in ``dims_json``


# What operators do, for intervals: calibration is asked by family.
FAMILIES: Mapping[str, str] = {
    "linear": "product", "bmm": "product", "conv2d": "convolution", "moe": "experts", "embedding": "embedding",
    "softmax": "rows", "layernorm": "rows", "rmsnorm": "rows", "rmsnorm_eager": "rows", "qk_norm": "rows",
    "log_softmax": "rows", "cross_entropy": "rows", "rope": "element-wise", "rope_eager": "element-wise",
    "silu_mul": "element-wise", "add": "element-wise", "mul": "element-wise", "div": "element-wise",
    "pow": "element-wise", "add_scalar": "element-wise", "mul_scalar": "element-wise", "div_scalar": "element-wise",
    "pow_scalar": "element-wise", "relu": "element-wise", "gelu": "element-wise", "silu": "element-wise",
    "tanh": "element-wise", "gdn": "recurrence", "mamba2": "recurrence", "sampler": "sampler", "subgraph": "subgraph",
}  # fmt: skip
PREFIXES = (("attn", "attention"), ("mla", "attention"))


def family(op: str) -> str:
    """What an operator does: "product", "rows", …; "other" where nobody said."""
    return FAMILIES.get(op) or next((name for prefix, name in PREFIXES if op.startswith(prefix)), "other")


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator's work on one device.

    Attributes:
        op: name in the profiles' vocabulary ("linear", "bmm", "layernorm", …), or the ir operator's own.
        kind: how it computes, as ``ir.operator.Kind``; what an operator without data is known by.
        dtype: "fp32", "bf16", "fp16", "fp8", … of the elements.
        dims: sizes by column name (``DIMS``), those that apply.
        extents: product of the extents of its loops by role, in the order of ``ROLES``.
        flops, bytes: arithmetic and least memory traffic.
        direction: "forward" or "backward".
        stack: the software that runs it: "torch" (eager), "inductor", "triton", "cudagraph", …
    """

    op: str
    kind: str
    dtype: str
    dims: Mapping[str, int]
    extents: tuple[int, int, int, int]
    flops: float
    bytes: float
    direction: str = "forward"
    stack: str = "torch"

    @property
    def key(self) -> tuple[object, ...]:
        """Hashable identity: equal kernels have equal keys."""
        dims = tuple(sorted(self.dims.items()))
        return (self.op, self.kind, self.dtype, dims, self.extents, self.flops, self.bytes, self.direction, self.stack)

    def text(self) -> str:
        """``linear bf16 forward, m 4096, n 1024, k 1024``."""
        sizes = "".join(f", {name} {size}" for name, size in self.dims.items())
        return f"{self.op} {self.dtype} {self.direction}{sizes}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for ``dims_json``; ``from_dict`` is its inverse."""
        return {
            "op": self.op,
            "kind": self.kind,
            "dtype": self.dtype,
            "dims": dict(self.dims),
            "extents": list(self.extents),
            "flops": self.flops,
            "bytes": self.bytes,
            "direction": self.direction,
            "stack": self.stack,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Kernel:
        """The inverse of ``as_dict``.

        Raises:
            KeyError, TypeError, ValueError: if a field is missing or no number.
        """
        extents = tuple(int(extent) for extent in data["extents"])
        if len(extents) != len(ROLES):
            raise ValueError(f"{len(extents)} extents, not {len(ROLES)}")
        return cls(
            str(data["op"]),
            str(data["kind"]),
            str(data["dtype"]),
            {k: int(v) for k, v in data["dims"].items()},
            (extents[0], extents[1], extents[2], extents[3]),
            float(data["flops"]),
            float(data["bytes"]),
            str(data.get("direction", "forward")),
            str(data.get("stack", "torch")),
        )


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Kernels that run as one, or one after the other, and who reads whose result: ``(producer, consumer)`` indices.

    ``fused`` says that they were compiled into one call: intermediate values then need not reach memory, and ``bytes``
    counts what enters and leaves.
    """

    kernels: tuple[Kernel, ...]
    edges: tuple[tuple[int, int], ...] = ()
    fused: bool = False
    bytes: float | None = field(default=None)  # None: the sum of the kernels'

    @classmethod
    def of(cls, kernel: Kernel) -> Subgraph:
        """The subgraph of one kernel."""
        return cls((kernel,))

    @property
    def flops(self) -> float:
        """Arithmetic of all kernels."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def traffic(self) -> float:
        """Least bytes to and from memory."""
        return sum(kernel.bytes for kernel in self.kernels) if self.bytes is None else self.bytes

    def to_json(self) -> str:
        """For the column ``dims_json`` of a row whose ``op`` is ``FUSED``."""
        nodes = [kernel.as_dict() for kernel in self.kernels]
        return json.dumps({"nodes": nodes, "edges": self.edges, "fused": self.fused, "bytes": self.bytes})

    @classmethod
    def from_json(cls, text: str) -> Subgraph:
        """The inverse of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: if it is no such text, or an edge names no node.
        """
        data = json.loads(text)
        kernels = tuple(Kernel.from_dict(node) for node in data["nodes"])
        edges = tuple((int(a), int(b)) for a, b in data["edges"])
        if any(not 0 <= end < len(kernels) for edge in edges for end in edge):
            raise ValueError(f"an edge names a node that is not among the {len(kernels)}")
        return cls(kernels, edges, bool(data["fused"]), None if data["bytes"] is None else float(data["bytes"]))
