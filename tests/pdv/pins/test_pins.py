"""Pins: what they force and forbid in the plan found, what they leave free, and one error for each that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ir.builder import Builder
from ir.errors import NoPlanFitsError, PinsError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.sharding import Invariant, Replicate, Shard, State, format_sharding
from ir.verify import infer_shardings
from pdv.pcg.techniques import techniques
from pdv.pins import load_pins
from pdv.pins.conflict import contradiction
from pdv.problem import Pins, Problem
from pdv.rewrite.algebra import RULES
from pdv.rewrite.rule import Rule
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh
from tests.conftest import Golden
from tests.pdv import worlds
from tests.pdv.pins.graphs import gpt
from tests.test_docs import blocks

PAGE = Path(__file__).parents[3] / "docs" / "pins.md"
MESH = Mesh.of(dp=2, tp=2)
Content = Mapping[str, Any]  # Any: plain data


@cache
def graph(layers: int = 2) -> Graph:
    return gpt(layers)


def problem(
    pins: Content | Path, *, memory_limit: float = float("inf"), layers: int = 2, rules: tuple[Rule, ...] = ()
) -> Problem:
    loaded = load_pins(pins)
    mesh = MESH if loaded.mesh is None else Mesh.of(**loaded.mesh)
    bound = loaded.on(graph(layers), mesh)
    return worlds.problem(graph(layers), mesh, pins=bound, rules=rules, memory_limit=memory_limit)


def planned(pins: Content | Path, rules: tuple[Rule, ...] = ()) -> BestPlan:
    """The plan found; every constraint holds in it."""
    found = search_mesh(problem(pins, rules=rules))
    solution = found.solution
    kept = solution.problem.pins
    for node, splits in solution.assignment.splits.items():
        for axis, split in zip(solution.problem.mesh.axes, splits, strict=True):
            assert kept.split(node, axis.name, split)
    for param, storage in solution.assignment.storage.items():
        assert kept.rests(param, storage)
    return found


def refused(pins: Content | Path, *, memory_limit: float = float("inf")) -> PinsError:
    asked = problem(pins, memory_limit=memory_limit, layers=1)
    with pytest.raises(NoPlanFitsError) as caught:
        search_mesh(asked)
    blamed = contradiction(asked, caught.value)
    assert blamed is not None
    return blamed


def labels(found: BestPlan, op: str, axis: str) -> list[str]:
    position = found.solution.problem.mesh.index(axis)
    splits = found.solution.assignment.splits
    return [splits[node][position].label for node in found.solution.graph.nodes if node.op.name == op]


def rests(found: BestPlan, name: str) -> str:
    (param,) = [node for node in found.solution.graph.params if node.attr("source") == name]
    storage = found.solution.assignment.storage.get(param)
    return format_sharding(storage.sharding) if storage else "I,I"


@cache
def free_s() -> float:
    return planned({}).cost.seconds


def test_no_pins_are_free() -> None:
    assert free_s() == search_mesh(worlds.problem(graph(), MESH)).cost.seconds


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("ddp", {"data parallel"}),
        ("zero-2", {"data parallel", "ZeRO-2"}),
        ("zero-3", {"data parallel", "ZeRO-3"}),
        ("tensor", {"tensor parallel (column)", "tensor parallel (row)", "tensor parallel (heads)"}),
        ("tensor+sequence", {"tensor parallel (column)", "sequence parallel", "tensor parallel (heads)"}),
        ("context", {"context parallel"}),
    ],
)  # fmt: skip
def test_a_technique_is_what_the_axis_does(name: str, named: set[str]) -> None:
    found = planned({"techniques": {"dp": name}})
    assert named <= set(techniques(found.pcg, MESH)["dp"])
    if name in {"ddp", "zero-2", "zero-3"}:
        assert set(techniques(found.pcg, MESH)["dp"]) == named
    assert found.cost.seconds >= free_s() * (1 - 1e-12)


def test_an_axis_is_used_for_its_role_alone() -> None:
    found = planned({"axes": {"dp": "data", "tp": "context"}, "forbid": [{"technique": "zero"}]})
    kinds = techniques(found.pcg, MESH)
    assert set(kinds["dp"]) <= {"data parallel"}
    assert set(kinds["tp"]) <= {"context parallel"}


def test_a_parameter_rests_where_it_is_pinned() -> None:
    found = planned({"tensors": {"h.0.mlp.c_fc.weight": {"tp": "shard 1", "dp": "whole"}, "wte": {"dp": "cut"}}})
    assert rests(found, "h.0.mlp.c_fc.weight") == "I,S1"
    assert rests(found, "wte").startswith("S")


def test_equal_blocks_differ_where_one_is_pinned() -> None:
    free = rests(planned({}), "h.1.mlp.c_fc.weight")
    wanted, text = ("I,S1", "shard 1") if free != "I,S1" else ("I,S0", "shard 0")
    found = planned({"tensors": {"h.0.mlp.c_fc.weight": {"tp": text, "dp": "whole"}}})
    assert rests(found, "h.0.mlp.c_fc.weight") == wanted
    assert rests(found, "h.1.mlp.c_fc.weight") == free


def test_a_pinned_value_is_read_in_its_state() -> None:
    found = planned({"tensors": {"h.0.mid": {"dp": "shard 0", "tp": "whole"}, "ids": {"dp": "shard 0"}}})
    shardings = infer_shardings(found.pcg, MESH)
    (value,) = [node for node in found.solution.graph.nodes if node.name == "h.0.mid"]
    readers = [node for node in found.solution.graph.nodes if value in node.operands]
    assert len(readers) == 2
    for reader in readers:
        made = found.derived.places[reader]
        state = shardings[made.operands[reader.operands.index(value)]]
        assert state[0] == Shard(0)
        assert isinstance(state[1], Invariant | Replicate)


def test_operators_are_cut_as_pinned() -> None:
    found = planned({"operators": [{"op": "linear", "module": "h.*.mlp", "axis": "tp", "loop": "n"}]})
    assert labels(found, "linear", "tp").count("n") >= 4
    found = planned({"operators": [{"module": "h.1.attn", "op": "attention", "axis": "tp", "role": "context"}]})
    assert labels(found, "attention", "tp")[1] == "s"


def test_what_is_forbidden_is_not_done() -> None:
    found = planned({"forbid": [{"op": "linear", "loop": "k"}, {"op": "attention", "axis": "dp"}]})
    assert "k" not in labels(found, "linear", "tp") + labels(found, "linear", "dp")
    assert set(labels(found, "attention", "dp")) <= {"none", "sum2"}
    assert not any(
        isinstance(s, Shard) for s in _states_read(planned({"forbid": [{"tensor": "h.*.out", "state": "shard 0"}]}))
    )


def test_a_tied_parameter_is_not_gathered_where_that_is_forbidden() -> None:
    k = Builder()
    h = k.relu(k.linear(k.input("x", worlds.f32(12, 12)), k.param("w", worlds.f32(12, 12))))
    tied = k.graph({"y": k.linear(k.linear(h, k.param("w", worlds.f32(12, 12))), k.param("v", worlds.f32(24, 12)))})
    mesh, cut = Mesh.of(a=2), {"axes": {"a": "data"}, "tensors": {"w": {"a": "cut"}}}
    assert search_mesh(worlds.problem(tied, mesh, pins=load_pins(cut).on(tied, mesh))).cost.seconds > 0
    pins = load_pins({**cut, "forbid": [{"technique": "zero", "param": "w"}]}).on(tied, mesh)
    with pytest.raises(NoPlanFitsError) as caught:
        search_mesh(worlds.problem(tied, mesh, pins=pins))
    blamed = contradiction(worlds.problem(tied, mesh, pins=pins), caught.value)
    assert blamed is not None
    assert "tensors.w (a: cut)" in blamed.what
    assert "forbid technique: zero" in blamed.what or "technique: zero" in blamed.what


def test_variants_of_which_pins_leave_other_sinks_are_compared() -> None:
    k = Builder()
    h = k.relu(k.linear(k.input("x", worlds.f32(8, 8)), k.param("up", worlds.f32(16, 8))))
    two, mesh = k.graph({"y": k.linear(h, k.param("down", worlds.f32(8, 16)))}), Mesh.of(tp=2)
    pins = load_pins({"techniques": {"tp": "tensor"}}).on(two, mesh)
    assert search_mesh(worlds.problem(two, mesh, rules=RULES, pins=pins)).gap == 0.0


def _states_read(found: BestPlan) -> list[State]:
    """States along dp in which results of blocks are read, where cut along samples."""
    splits = found.solution.assignment.splits
    read = []
    for node in found.solution.graph.nodes:
        for i, operand in enumerate(node.operands):
            if operand.name in {"h.0.out", "h.1.out"}:
                read += [split.operands[i] for split in splits[node] if split.operands[i] == Shard(0)]
    return read


def test_a_rewrite_may_not_take_a_pinned_value_away() -> None:
    heads = {"techniques": {"tp": "tensor"}, "forbid": [{"op": "linear", "loop": "k", "module": "h.*.attn.c_attn"}]}
    assert any(node.op.name == "chunk" for node in graph().nodes)
    split_qkv = planned(heads, RULES).solution.graph
    assert not any(node.op.name == "chunk" for node in split_qkv.nodes)
    kept = planned({"tensors": {"h.*.attn.qkv": {"dp": "whole"}}}, RULES).solution.graph
    assert sum(node.name.endswith(".qkv") for node in kept.nodes) == 2


WRONG = {
    "unknown-key": "tensor: {}",
    "unknown-axis": "techniques: {dpp: ddp}",
    "unknown-technique": "techniques: {dp: zero3}",
    "zero-1": "techniques: {dp: zero-1}",
    "empty": "# nothing yet",
    "nothing-to-follow": "techniques: {tp: expert}",
    "mesh-a-number": "mesh: 8",
    "operators-a-mapping": "operators: {op: linear}",
    "unknown-role": "axes: {dp: batch}",
    "no-such-tensor": 'tensors: {"mlp.c_fc.weight": {tp: shard 0}}',
    "mistyped-tensor": "tensors: {h.0.mlp.c_fc.wieght: {tp: shard 0}}",
    "no-such-dim": "tensors: {wte: {tp: shard 2}}",
    "state": "tensors: {wte: {tp: S0}}",
    "no-such-operator": "forbid: [{op: liner}]",
    "no-such-loop": "operators: [{op: linear, axis: tp, loop: m}]",
    "no-such-module": "operators: [{module: h.2.attn, axis: tp, loop: n}]",
    "nothing-of-all": "operators: [{op: layer_norm, module: h.0.attn, axis: tp, loop: none}]",
    "loop-and-role": "operators: [{op: linear, axis: tp, loop: n, role: data}]",
    "forbids-everything": "forbid: [{}]",
    "state-alone": "forbid: [{tensor: wte}]",
    "zero-of-operators": "forbid: [{technique: zero-3, op: linear}]",
    "mesh-zero": "mesh: {dp: 0}",
    "list": "- dp",
    "option": "micro_batches: 4\nmesh: {dp: 2}",
    "twice": "axes: {dp: data}\naxes: {dp: data}",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pin_is_one_error(name: str, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pins.yaml").write_text(WRONG[name] + "\n")
    with pytest.raises(PinsError) as caught:
        load_pins(Path("pins.yaml")).on(graph(), MESH)
    golden(f"errors/pins-{name}.txt", f"{caught.value}\n")


CONTRADICTIONS = {
    "two-techniques": "axes: {tp: data}\ntechniques: {tp: tensor}",
    "two-states": 'tensors:\n  "h.*.mlp.c_fc.weight": {tp: shard 0}\n  "*.c_fc.weight": {tp: whole}',
    "one-does-not-divide": "mesh: {dp: 2, tp: 5}\noperators: [{op: attention, axis: tp, role: tensor}]",
    "storage-and-gather": "techniques: {dp: zero-3}\nforbid: [{technique: zero, param: wte}]",
    "across-operators": (
        "operators:\n  - {name: h.0.mlp.down, axis: tp, loop: n}\n  - {name: h.0.out, axis: tp, loop: sum0+1}\n"
        "forbid: [{op: attention, axis: dp}]"
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_name_the_pins(
    name: str, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pins.yaml").write_text(CONTRADICTIONS[name] + "\n")
    golden(f"errors/pins-contradict-{name}.txt", f"{refused(Path('pins.yaml'))}\n")


def test_pins_to_blame_for_memory_are_named() -> None:
    pins = {"techniques": {"dp": "ddp"}, "tensors": {"*": {"tp": "whole"}}, "forbid": [{"op": "gelu", "axis": "tp"}]}
    whole, cut = {"tensors": {"*": {"tp": "whole", "dp": "whole"}}}, {"techniques": {"dp": "zero-3", "tp": "tensor"}}
    largest, smallest = (search_mesh(problem(entry, layers=1)).cost.peak_bytes for entry in (whole, cut))
    error = refused(pins, memory_limit=(smallest + largest) / 2)
    assert "fits in memory" in error.what
    assert "tensors.'*'" in error.what
    assert "gelu" not in error.what


def test_content_is_what_is_pinned() -> None:
    one, other = (
        load_pins({"mesh": {"dp": 2}, "axes": {"dp": "data"}}),
        load_pins({"axes": {"dp": ["data"]}, "mesh": {"dp": 2}}),
    )
    assert one.content == other.content != load_pins({}).content
    assert load_pins({"mesh": {"dp": 2, "tp": 2}}).on(graph(), MESH) == Pins()


EXAMPLES = [block for block in blocks(PAGE) if block.startswith("# pins")]


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_of_the_documentation_are_kept(text: str) -> None:
    planned(yaml.safe_load(text))


def test_the_contradiction_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = [block for block in blocks(PAGE) if block.startswith("# contradiction")]
    (message,) = [block for block in blocks(PAGE) if block.startswith("error: bad-pins")]
    monkeypatch.chdir(tmp_path)
    Path("pins.yaml").write_text(text)
    assert " ".join(message.split()) == f"error: {refused(Path('pins.yaml'))}"


def test_contradictions_in_a_program_of_several_outputs_name_the_pins() -> None:
    k = Builder()
    h = k.linear(k.input("x", worlds.f32(4, 8)), k.param("up", worlds.f32(8, 8)), name="up.out")
    graph = k.graph({"h": h, "y": k.linear(h, k.param("down", worlds.f32(8, 8)), name="down.out")})
    pins = {
        "operators": [
            {"name": name, "axis": "a", "loop": loop} for name, loop in (("up.out", "n"), ("down.out", "sum0"))
        ]
    }
    of = worlds.problem(graph, Mesh.of(a=2), pins=load_pins(pins).on(graph, Mesh.of(a=2)))
    with pytest.raises(NoPlanFitsError) as refused_by:
        search_mesh(of)
    error = contradiction(of, refused_by.value)
    assert error is not None
    assert "contradict each other" in str(error)
