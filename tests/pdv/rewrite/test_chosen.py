"""Rules by name or file: shipped, none, or laws that are proven first; a plan carries those that it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ir.errors import UsageError
from ir.mesh import Mesh
from pdv.cluster import load_cluster
from pdv.pins import load_pins
from pdv.plan.derivation import replay
from pdv.plan.document import plan_document, read_problem
from pdv.rewrite.algebra import RULES
from pdv.rewrite.chosen import chosen_rules
from pdv.search.meshes import search_mesh
from tests.conftest import Golden
from tests.pdv import worlds

LAPTOP = Path(__file__).parents[3] / "examples/clusters/laptop-4.yaml"
APART = "take-apart: chunk(linear(x, w), dim=-1, parts=p, index=i) == linear(x, chunk(w, dim=0, parts=p, index=i))"
TRUE = f"# laws of my own\n\n{APART} for x[*s, k] w[n, k]\n"


def test_names() -> None:
    assert chosen_rules(None) == chosen_rules("shipped") == chosen_rules(["none", "shipped"]) == RULES
    assert chosen_rules("none") == ()


def test_a_file_of_laws_is_proven_and_used(tmp_path: Path) -> None:
    (tmp_path / "my.laws").write_text(TRUE)
    rules = chosen_rules(tmp_path / "my.laws")
    assert [rule.name for rule in rules] == ["take-apart", "take-apart~"]
    graph, mesh = worlds.attention_block(fused=True), Mesh.of(a=3)
    pins = load_pins({"techniques": {"a": "tensor"}}).on(graph, mesh)
    found = search_mesh(worlds.problem(graph, mesh, rules=chosen_rules([tmp_path / "my.laws", "shipped"]), pins=pins))
    document = plan_document(
        found, cluster=load_cluster(LAPTOP), strategy="backtrack", seconds=0.0
    )  # fmt: skip
    document = json.loads(json.dumps(document))
    assert document["laws"]
    problem = read_problem(document, graph)
    assert {rule.law.name for rule in problem.rules} == {law.partition(":")[0] for law in document["laws"]}
    assert replay(problem, document["derivation"]).digest == document["pcg_hash"]


WRONG = {
    "absent": None,
    "false": "swap: linear(x, w) == linear(w, x) for x[n, k] w[n, k]\n",
    "no-law": "this is no law\n",
    "other": f"{APART.replace('take-apart', 'associate-linear')} for x[*s, k] w[n, k]\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files(name: str, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if (text := WRONG[name]) is not None:
        Path("my.laws").write_text(text)
    with pytest.raises(UsageError) as caught:
        chosen_rules(["shipped", "my.laws"])
    golden(f"errors/rules-{name}.txt", f"{caught.value}\n")
