"""`pdv rules`: what it proves, what it refuses and how, what it lists."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pdv.cli.app import run
from pdv.rewrite.law import parse_law

TRUE = "share: add(linear(x, u), linear(x, v)) == linear(x, add(u, v)) for x[*s, k] u[n, k] v[n, k]"
FALSE = "lose: add(linear(x, u), linear(x, v)) == linear(x, add(u, u)) for x[*s, k] u[n, k] v[n, k]"


def test_true_laws_are_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.laws"
    path.write_text(f"# a note\n\n{TRUE}\n")
    assert run(["rules", "check", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["laws"], told["verified"]) == (1, True)


def test_a_false_law_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.laws"
    path.write_text(f"{TRUE}\n{FALSE}\n")
    assert run(["rules", "check", str(path)]) == 7
    assert "law lose is false at" in capsys.readouterr().err


def test_what_is_no_law_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.laws"
    path.write_text("linear(x, w)\n")
    assert run(["rules", "check", str(path)]) == 2
    assert run(["rules", "check", str(tmp_path / "none.laws")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_laws_are_listed_as_they_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rules", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [parse_law(line).name for line in lines]
    assert len(set(names)) == len(names) > 30


def test_rules_that_match_a_model_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two products of one input: they may be fused."""
    weights = [numpy_helper.from_array(np.ones((8, 8), dtype=np.float32) * i, f"w{i}") for i in (1, 2)]
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in (1, 2)]
    nodes.append(helper.make_node("Add", ["y1", "y2"], ["y"]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 8)) for name in ("x", "y"))
    model = helper.make_model(
        helper.make_graph(nodes, "two", [x], [y], weights), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    path = tmp_path / "two.onnx"
    onnx.save(model, path)
    assert run(["rules", "list", "--fired", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["fired"]
    assert rows
    assert all(row["matches"] > 0 and row["uses"] == 0 for row in rows)
    assert run(["rules", "list", "--fired", str(path), "--mode", "dream"]) == 2
