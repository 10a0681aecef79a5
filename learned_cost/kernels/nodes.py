"""Kernels by columns, with the subgraph that each belongs to: what features are computed of.

A row of a profile is a subgraph of one kernel, or, where its ``op`` is ``FUSED``, of the kernels in ``dims_json``. A
question of the search is a list of subgraphs. Both become ``Nodes``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.kernel import DIMS, FUSED, ROLES, Kernel, Subgraph
from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

# Sizes that public data keeps in ``dims_json``.
EXTRA = (
    "n_decode", "kv_decode", "d_model", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "d_state", "nheads",
    "n_groups", "chunk_size", "activated_experts", "generation",
)  # fmt: skip
TEXTS = ("op", "kind", "dtype", "kv_dtype", "stack", "kernel", "distribution", "direction")
# Sources that name the kernel a library chose, which nobody knows before it ran.
CHOSEN_BY_LIBRARY = ("neusight", "pipeweave")

# What public data does not say, for it is the same in all of its rows.
KINDS: Mapping[str, str] = {
    "linear": "contraction",
    "bmm": "contraction",
    "moe": "contraction",
    "conv2d": "stencil",
    "embedding": "index",
    "softmax": "row",
    "layernorm": "row",
    "rmsnorm": "row",
    "rmsnorm_eager": "row",
    "qk_norm": "row",
    "sampler": "row",
}
KIND_PREFIXES = (("attn", "row"), ("mla", "row"), ("gdn", "row"), ("mamba", "row"))


@dataclass(frozen=True)
class Nodes:
    """Columns of kernels.

    Attributes:
        sizes: [n] by name, of ``DIMS``, ``EXTRA`` and ``ROLES``; zero where one does not apply.
        flops, bytes: [n]; zero where nobody said.
        texts: codes [n] into a vocabulary, by name (``TEXTS``); -1 where one does not apply.
        graph: [n], which subgraph a kernel is of; subgraphs are in order.
        edges: [2, e], (producer, consumer) of all subgraphs.
        traffic, fused: [g] of each subgraph: bytes in and out, and whether it is one compiled call.
        device: [g] codes into ``devices``.
    """

    sizes: Mapping[str, Floats]
    flops: Floats
    bytes: Floats
    texts: Mapping[str, tuple[Codes, tuple[str, ...]]]
    graph: Codes
    edges: Codes
    traffic: Floats
    fused: NDArray[np.bool_]
    device: Codes
    devices: tuple[DeviceRecord, ...]

    def __len__(self) -> int:
        return len(self.flops)


def of_subgraphs(subgraphs: Sequence[Subgraph], device: DeviceRecord) -> Nodes:
    """Questions about one device."""
    kernels = [kernel for subgraph in subgraphs for kernel in subgraph.kernels]
    counts = np.array([len(subgraph.kernels) for subgraph in subgraphs], dtype=np.int64)
    first = np.cumsum(counts) - counts
    pairs = [(a + start, b + start) for s, start in zip(subgraphs, first, strict=True) for a, b in s.edges]
    columns = _columns_of(kernels)
    return Nodes(
        **columns,
        graph=np.repeat(np.arange(len(subgraphs)), counts),
        edges=np.array(pairs, dtype=np.int64).reshape(-1, 2).T,
        traffic=np.array([subgraph.traffic for subgraph in subgraphs], dtype=np.float64),
        fused=np.array([subgraph.fused for subgraph in subgraphs], dtype=bool),
        device=np.zeros(len(subgraphs), dtype=np.int64),
        devices=(device,),
    )


def of_table(table: Table, devices: Mapping[str, DeviceRecord]) -> Nodes:
    """Rows of a profile, a subgraph each, in order."""
    is_fused = table.is_text("op", FUSED)
    plain = np.flatnonzero(~is_fused)
    columns = _columns_of_rows(table.take(plain))
    names = table.vocab["gpu"]
    used = sorted(set(table["gpu"].tolist()))
    place = np.full(len(names), -1, dtype=np.int64)
    place[used] = np.arange(len(used))
    records = tuple(devices[names[code]] for code in used)
    traffic = np.zeros(len(table))
    traffic[plain] = columns["bytes"]
    graph, edges = plain.astype(np.int64), np.zeros((2, 0), dtype=np.int64)
    fused = np.zeros(len(table), dtype=bool)
    if is_fused.any():
        rows = np.flatnonzero(is_fused)
        subgraphs = [Subgraph.from_json(table.at("dims_json", int(row)) or "") for row in rows]
        inner = of_subgraphs(subgraphs, records[0])
        columns = _join(columns, inner)
        order = np.argsort(np.concatenate([graph, rows[inner.graph]]), kind="stable")
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        columns = _take(columns, order)
        graph = np.concatenate([graph, rows[inner.graph]])[order]
        edges = back[inner.edges + len(plain)]
        traffic[rows], fused[rows] = inner.traffic, inner.fused
    return Nodes(
        **columns, graph=graph, edges=edges, traffic=traffic, fused=fused, device=place[table["gpu"]], devices=records
    )


Columns = dict[str, Any]  # Any: the first four fields of ``Nodes``, by name


def _columns_of(kernels: Sequence[Kernel]) -> Columns:
    sizes = {name: np.zeros(len(kernels)) for name in (*DIMS, *EXTRA, *ROLES)}
    for row, kernel in enumerate(kernels):
        for name, size in kernel.dims.items():
            sizes[name][row] = size
    extents = np.array([kernel.extents for kernel in kernels], dtype=np.float64).reshape(-1, len(ROLES))
    sizes |= {role: extents[:, i] for i, role in enumerate(ROLES)}
    spelled: dict[str, Iterable[str | None]] = {
        "op": (k.op for k in kernels),
        "kind": (k.kind for k in kernels),
        "dtype": (k.dtype for k in kernels),
        "stack": (f"pdv/{k.stack}" for k in kernels),
        "direction": (k.direction for k in kernels),
    }
    missing = np.full(len(kernels), -1, dtype=np.int64)
    texts = {name: _code(spelled[name]) if name in spelled else (missing, ()) for name in TEXTS}
    flops = np.array([kernel.flops for kernel in kernels], dtype=np.float64)
    return {"sizes": sizes, "flops": flops, "bytes": np.array([k.bytes for k in kernels], np.float64), "texts": texts}


def _code(values: Iterable[str | None]) -> tuple[Codes, tuple[str, ...]]:
    place: dict[str, int] = {}
    codes = [-1 if value is None else place.setdefault(value, len(place)) for value in values]
    return np.array(codes, dtype=np.int64), tuple(place)


def _columns_of_rows(table: Table) -> Columns:
    sizes: dict[str, Floats] = {name: np.maximum(table[name], 0).astype(np.float64) for name in DIMS}
    sizes |= _from_json(table)
    ops = _text(table, "op")
    return {
        "sizes": sizes,
        "flops": np.nan_to_num(np.asarray(table["flops"], dtype=np.float64)),
        "bytes": np.nan_to_num(np.asarray(table["bytes"], dtype=np.float64)),
        "texts": {
            "op": ops,
            "kind": _rename(ops, _kind),
            "dtype": _text(table, "dtype"),
            "kv_dtype": _text(table, "kv_dtype"),
            "stack": _stack(table),
            "kernel": _kernel(table),
            "distribution": _text(table, "distribution"),
            "direction": _direction(table),
        },
    }


def _from_json(table: Table) -> dict[str, Floats]:
    """``EXTRA`` and ``ROLES`` of each row: few texts say it of many rows."""
    values = np.zeros((len(table.vocab["dims_json"]) + 1, len(EXTRA) + len(ROLES)))
    used = np.unique(table["dims_json"])
    for code in used[used >= 0]:
        data = json.loads(table.vocab["dims_json"][code])
        values[code, : len(EXTRA)] = [_number(data.get(name)) for name in EXTRA]
        values[code, EXTRA.index("generation")] = float(data.get("phase") == "generation")
        values[code, len(EXTRA) :] = data.get("extents", [0.0] * len(ROLES))
    found = values[table["dims_json"]]  # code -1 takes the last row, of zeros
    return {name: found[:, i] for i, name in enumerate((*EXTRA, *ROLES))}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _kind(op: str) -> str:
    return KINDS.get(op) or next((kind for prefix, kind in KIND_PREFIXES if op.startswith(prefix)), "map")


def _text(table: Table, name: str) -> tuple[Codes, tuple[str, ...]]:
    return table[name].astype(np.int64), table.vocab[name]


def _rename(text: tuple[Codes, tuple[str, ...]], rename: Callable[[str], str]) -> tuple[Codes, tuple[str, ...]]:
    codes, vocab = text
    inner, names = _code(rename(name) for name in vocab)
    return np.append(inner, -1)[codes], names


def _stack(table: Table) -> tuple[Codes, tuple[str, ...]]:
    """What ran it: "pdv/torch", "pdv/inductor", …; of public data, the source and its back end."""
    sources, backends = table.vocab["source"], table.vocab["backend"]
    own = table["stack"].astype(np.int64)
    pair = table["source"].astype(np.int64) * (len(backends) + 1) + table["backend"].astype(np.int64) + 1
    found, inner = np.unique(np.where(own >= 0, -2 - own, pair), return_inverse=True)

    def spelled(code: int) -> str:
        if code <= -2:
            return f"pdv/{table.vocab['stack'][-2 - code]}"
        source, backend = divmod(code, len(backends) + 1)
        return f"{sources[source]}/{backends[backend - 1] if backend else 'unknown'}"

    return inner.astype(np.int64), tuple(spelled(int(code)) for code in found)


def _kernel(table: Table) -> tuple[Codes, tuple[str, ...]]:
    codes = table["kernel"].astype(np.int64)
    for source in CHOSEN_BY_LIBRARY:
        codes = np.where(table.is_text("source", source), -1, codes)
    return codes, table.vocab["kernel"]


def _direction(table: Table) -> tuple[Codes, tuple[str, ...]]:
    codes = table["direction"].astype(np.int64)
    names = table.vocab["direction"]
    names = names if "forward" in names else (*names, "forward")
    return np.where(codes < 0, names.index("forward"), codes), names


def _join(rows: Columns, nodes: Nodes) -> Columns:
    """Columns of rows, and below them those of the subgraphs' kernels."""
    texts = {}
    for name, (codes, vocab) in rows["texts"].items():
        more, words = nodes.texts[name]
        places = {word: code for code, word in enumerate(vocab)}
        renamed = np.array([*(places.setdefault(word, len(places)) for word in words), -1], dtype=np.int64)
        texts[name] = np.concatenate([codes, renamed[more]]), tuple(places)
    sizes = {name: np.concatenate([sizes, nodes.sizes[name]]) for name, sizes in rows["sizes"].items()}
    both = {name: np.concatenate([rows[name], getattr(nodes, name)]) for name in ("flops", "bytes")}
    return {"sizes": sizes, "texts": texts, **both}


def _take(columns: Columns, order: Codes) -> Columns:
    return {
        "sizes": {name: sizes[order] for name, sizes in columns["sizes"].items()},
        "texts": {name: (codes[order], vocab) for name, (codes, vocab) in columns["texts"].items()},
        "flops": columns["flops"][order],
        "bytes": columns["bytes"][order],
    }
