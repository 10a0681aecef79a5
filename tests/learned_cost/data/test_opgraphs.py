"""Nodes of operator graphs as kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ir.errors import DataError
from learned_cost.data.dataset import read_folder
from learned_cost.data.kernel import Kernel
from learned_cost.data.opgraphs import graph_kernels
from tests.learned_cost.data.test_dataset import OPEN_DATA, needs_open_data
from tests.learned_cost.measurements import write

NODES: list[tuple[str, str, str, str, dict[str, Any] | None]] = [
    ("placeholder", "input_ids", "[]", "(4, 1024)", None),
    ("call_method", "size", "[[4, 1024]]", "(1,)", None),
    ("call_function", "<built-in function add>", "[[1]]", "(1,)", None),
    ("call_module", "transformer.wte", "[[4, 1024]]", "(4, 1024, 1280)", {"op": "embedding", "m": 4096, "n": 1280}),
    ("call_module", "transformer.drop", "[[4, 1024, 1280]]", "(4, 1024, 1280)", None),
    ("call_module", "h.0.ln_1", "[[4, 1024, 1280]]", "(4, 1024, 1280)", {"op": "layernorm", "m": 4096, "n": 1280}),
    ("call_function", "<built-in method addmm of type object>", "[[3840], [4096, 1280], [1280, 3840]]", "(4096, 3840)",
     {"op": "linear", "m": 4096, "n": 3840, "k": 1280, "b": 1, "flops": 2.0 * 4096 * 3840 * 1280}),
    ("call_method", "permute", "[[4, 1024, 20, 64]]", "(4, 20, 1024, 64)", None),
    ("call_function", "<built-in method matmul of type object>", "[[4, 20, 1024, 64], [4, 20, 64, 512]]",
     "(4, 20, 1024, 512)", {"op": "bmm", "b": 80, "m": 1024, "n": 512, "k": 64}),
    ("call_function", "<built-in function truediv>", "[[4, 20, 8, 8], [1]]", "(4, 20, 8, 8)", {"op": "div_scalar"}),
    ("call_function", "<built-in function add>", "[[4, 8], [4, 8]]", "(4, 8)",
     {"op": "add", "bytes": 3 * 32 * 4.0, "flops": 32.0}),
    ("call_function", "<function softmax>", "[[32, 8, 64]]", "(32, 8, 64)", {"op": "softmax", "m": 256, "n": 64}),
    ("call_module", "lm_head", "[[4, 1024, 1280]]", "(4, 1024, 50257)", {"op": "linear", "n": 50257, "k": 1280}),
    ("call_method", "masked_fill", "[[4, 8], [4, 8], [1]]", "(4, 8)", {"op": "masked_fill", "m": 4, "n": 8}),
    ("output", "output", "[[4, 8]]", "(4, 8)", None),
]  # fmt: skip


def graph(folder: Path, nodes: list[tuple[str, str, str, str, dict[str, Any] | None]]) -> list[Kernel]:
    columns = {
        "graph": ["g"] * len(nodes), "node": list(range(len(nodes))), "op": [node[0] for node in nodes],
        "target": [node[1] for node in nodes], "input_shapes": [node[2] for node in nodes],
        "output_shape": [node[3] for node in nodes], "dtype": ["torch.float32"] * len(nodes),
    }  # fmt: skip
    table = read_folder(write(folder, "opgraphs", columns)).graphs
    assert table is not None
    return graph_kernels(table)["g"]


def test_nodes_are_kernels_or_nothing(tmp_path: Path) -> None:
    kernels = graph(tmp_path, NODES)
    expected = [node[4] for node in NODES if node[4] is not None]
    assert len(kernels) == len(expected)
    for kernel, wanted in zip(kernels, expected, strict=True):
        has = {"op": kernel.op, "flops": kernel.flops, "bytes": kernel.bytes, **kernel.dims}
        assert {name: has[name] for name in wanted} == wanted


def test_a_shape_that_is_none_names_its_row(tmp_path: Path) -> None:
    wrong = ("call_module", "lm_head", "[[4, 1024, 'x']]", "(4, 1024, 50257)", None)
    with pytest.raises(DataError, match="row 15"):
        graph(tmp_path, [*NODES, wrong])


@needs_open_data
def test_the_open_graphs_are_products_mostly(tmp_path: Path) -> None:
    (tmp_path / "opgraphs.parquet").symlink_to(OPEN_DATA / "opgraphs.parquet")
    table = read_folder(tmp_path).graphs
    assert table is not None
    kernels = graph_kernels(table)
    assert len(kernels) == 26
    for found in kernels.values():
        products = sum(kernel.flops for kernel in found if kernel.kind == "contraction")
        assert products > 0.95 * sum(kernel.flops for kernel in found)
