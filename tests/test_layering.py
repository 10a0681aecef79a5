"""Who may import whom (the tables below, and the layers of tests.structure); planning's doors open without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.structure import (
    ARCHITECTURE,
    LAYERS,
    PACKAGES,
    ROOT,
    Module,
    diagram,
    drawn,
    imports,
    layer_of,
    modules,
    tree,
)

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
    "pdv/cli/launch.py": "keeps the kernels of a package as a profile",
    "pdv/measure/bench.py": "names the record that measurements are kept under",
    "pdv/measure/speed.py": "measures how fast the machine is",
}
# of learned_cost, what a price needs: NumPy is enough
WITHOUT_TRAINING = {
    f"learned_cost/{name}.py"
    for name in (
        "devices/device",
        "data/kernel",
        "describe",
        "kernels/forward",
        "kernels/predict",
        "collectives/model",
        "weights",
    )
}
TRAINING_PACKAGES = {"torch", "torch_geometric", "pyarrow", "sklearn"}
# what ir may stand on beside the standard library
IR_THIRD_PARTY = {"numpy", "yaml"}  # yaml: files are read below all that reads them
TORCH_FOLDERS = ("pdv/frontend/", "pdv/emit/", "pdv/check/", "pdv/loops/", "learned_cost/")
# lazily, inside a function: each with its reason
TORCH_LAZILY = {
    "pdv/cli/doctor.py": "tells what this torch can run on",
    "pdv/compile.py": "plan.build() runs the package",
    "pdv/search/strategies/gradient.py": "differentiates the relaxed cost",
}


def forbidden(module: Module) -> Iterator[str]:
    """What a module imports and must not."""
    name, package = module.where, module.name.split(".")[0]
    runs_torch = any(entry.name == "torch" for entry in imports(module.tree) if entry.kind != "types")
    for entry in imports(module.tree):
        imported, eager = entry.name.split(".")[0], entry.kind == "eager"
        allowed = True
        if imported in (*PACKAGES, "tests", "benchmarks", "examples", "tools"):
            door = imported == "learned_cost" and name in LEARNED_COST_DOORS and not eager
            allowed = imported in ALLOWED[package] or door
        elif name in WITHOUT_TRAINING:
            allowed = imported not in TRAINING_PACKAGES
        elif imported == "torch":
            lazily = name in TORCH_LAZILY and not eager
            allowed = name.startswith(TORCH_FOLDERS) or lazily or not runs_torch
        elif package == "ir":
            allowed = imported in sys.stdlib_module_names | IR_THIRD_PARTY
        if not allowed:
            yield f"{name} imports {imported}"


def test_imports_follow_the_table() -> None:
    assert [wrong for module in modules().values() for wrong in forbidden(module)] == []


@pytest.mark.parametrize(
    ("name", "text", "imported"),
    [
        ("ir.new", "import pdv.compile", "pdv"),
        ("ir.new", "def f():\n    import torch", "torch"),
        ("ir.new", "import rich", "rich"),
        ("pdv.new", "import learned_cost.weights", "learned_cost"),
        ("pdv.new", "from tests import structure", "tests"),
        ("pdv.compile", "import torch", "torch"),
        ("pdv.search.new", "def f():\n    import torch", "torch"),
        ("learned_cost.describe", "import pyarrow", "pyarrow"),
    ],
)
def test_what_the_table_forbids_is_seen(name: str, text: str, imported: str) -> None:
    module = Module(name, ROOT / f"{name.replace('.', '/')}.py", text, ast.parse(text))
    assert f"{module.where} imports {imported}" in forbidden(module)


def test_every_module_has_a_layer() -> None:
    assert {layer_of(name) for name in modules()} == set(LAYERS)
    with pytest.raises(LookupError):
        layer_of("elsewhere.module")


def test_the_diagram_is_that_of_the_code() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert drawn(page) == diagram(), "python -m tests.structure --renew draws it anew"
    assert drawn(page, "text") == tree(), "python -m tests.structure --renew writes it anew"


def test_when_an_import_happens_is_seen() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.b\ndef f():\n    from torch import nn\n"
    found = [(entry.name, entry.line, entry.kind) for entry in imports(ast.parse(text))]
    assert found[2:] == [("a.b", 3, "types"), ("torch", 5, "lazy"), ("torch.nn", 5, "lazy")]


@pytest.mark.parametrize("statement", ["import ir", "import pdv", "import pdv.cluster", "import pdv.cli.app"])
def test_imports_without_torch(statement: str) -> None:
    heavy = "{'torch', 'torch_geometric', 'pyarrow', 'onnx', 'transformers'}"
    code = f"import sys; {statement}; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_simulates_loads_neither_torch_nor_a_search() -> None:
    """`pdv simulate --arch` starts in a second and a half: strategies and laws would be a quarter of one."""
    code = "import sys, pdv.prices, pdv.manual.configuration, pdv.memory, pdv.report.simulated, pdv.simulate.step\n"
    code += "assert not {'torch', 'onnx', 'pdv.search.strategies', 'pdv.rewrite.algebra'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pdv", "--help"],
        check=True, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not {"torch", "onnx", "transformers", "scipy"} & loaded
