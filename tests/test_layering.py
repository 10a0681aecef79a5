"""Who may import whom (the table below), and that planning's doors open without torch, quickly."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("ir", "pdv", "learned_cost")

# package -> packages of ours it may import; a lazy import counts too
ALLOWED = {"ir": {"ir"}, "learned_cost": {"ir", "learned_cost"}, "pdv": {"ir", "pdv"}}
# the doors from the compiler to the learned cost model, all of them lazy (docs/decisions/0009): each with its reason
LEARNED_COST_DOORS = {
    "pdv/prices.py": "the learned prices are one choice of CostModel",
    "pdv/cluster/presets.py": "a device's published numbers are written once, in its record",
    "pdv/cli/cluster.py": "writes the record of the machine at hand",
    "pdv/cli/bench.py": "measures links",
    "pdv/cli/cost.py": "trains and scores the model",
    "pdv/cli/profile.py": "measures",
}
# of learned_cost, what a price needs: NumPy is enough
WITHOUT_TRAINING = {
    f"learned_cost/{name}.py" for name in ("device", "kernel", "describe", "predict", "collectives", "weights")
}
TRAINING_PACKAGES = {"torch", "torch_geometric", "pyarrow", "sklearn"}
# what ir may stand on beside the standard library
IR_THIRD_PARTY = {"numpy", "networkx"}
TORCH_FOLDERS = ("pdv/frontend/", "pdv/emit/", "pdv/check/", "learned_cost/")
# lazily, inside a function: each with its reason
TORCH_LAZILY = {
    "pdv/cli/doctor.py": "tells what this torch can run on",
    "pdv/compile.py": "plan.build() runs the package",
    "pdv/search/strategies/gradient.py": "differentiates the relaxed cost",
}

FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each imported top-level package, and whether it is imported when the module is (not lazily, not for types)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    eager = set(map(id, eager_nodes(tree.body)))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            yield name.split(".")[0], id(node) in eager


def eager_nodes(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: module level, and ifs and tries there, but not `if TYPE_CHECKING`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from eager_nodes(node.body + node.orelse)
        if isinstance(node, ast.Try | ast.With):
            yield from eager_nodes(node.body)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    package = name.split("/")[0]
    for imported, eager in imports(path):
        if imported in (*OURS, "tests", "benchmarks", "examples"):
            door = imported == "learned_cost" and name in LEARNED_COST_DOORS and not eager
            assert imported in ALLOWED[package] or door, f"{name} imports {imported}"
        elif name in WITHOUT_TRAINING:
            assert imported not in TRAINING_PACKAGES, f"{name} imports {imported}"
        elif imported == "torch":
            lazily = name in TORCH_LAZILY and not eager
            assert name.startswith(TORCH_FOLDERS) or lazily or not runs(path), f"{name} imports torch"
        elif package == "ir":
            assert imported in sys.stdlib_module_names | IR_THIRD_PARTY, f"{name} imports {imported}"


def runs(path: Path) -> bool:
    """Whether any torch import of the file is more than a name for annotations."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    inside = {id(child) for node in for_types for child in ast.walk(node)}
    return any(
        "torch" in ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside
    )


def test_a_torch_import_in_the_wrong_place_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from torch import nn\n")
    assert list(imports(wrong)) == [("torch", False)]
    assert runs(wrong)
    right = tmp_path / "right.py"
    right.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n")
    assert not runs(right)


@pytest.mark.parametrize("statement", ["import ir", "import pdv", "import pdv.cluster", "import pdv.cli.app"])
def test_imports_without_torch(statement: str) -> None:
    heavy = "{'torch', 'torch_geometric', 'pyarrow', 'onnx', 'transformers'}"
    code = f"import sys; {statement}; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pdv", "--help"],
        check=True, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not {"torch", "onnx", "transformers", "scipy"} & loaded
