"""Programs of many equal layers: the text is run with few of them, and builds a model of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.depth import shorten
from ir.views import sources_of
from pdv.check import check_text, checked
from pdv.check.fewer import renumber
from pdv.check.imports import Texts
from pdv.emit.emission import Emission, module_texts
from pdv.frontend.program import Weights
from tests.pdv.check.test_checked import no_shape
from tests.pdv.emit.graphs import cut_batch, floats, stack

LAYERS = 9
MESH = Mesh.of(dp=2, tp=3)


def deep() -> Graph:
    return stack(LAYERS, batch=6, sequence=12, width=18, heads=3)


def cut() -> Graph:
    """The batch cut over dp; tp is idle."""
    return cut_batch(deep(), whole=True)


def test_few_layers_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FEW_ELEMENTS", 0)
    found = check_text(deep(), Emission.of(cut(), MESH, train=True), Weights({}))
    assert found.ran
    assert f"{checked.KEPT} of" in found.sizes
    assert "equal layers" in found.sizes


def test_an_edited_text_is_run_with_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit may be about one layer alone."""
    monkeypatch.setattr(checked, "FEW_ELEMENTS", 0)
    files = module_texts(Emission.of(cut(), MESH, train=True).body(no_shape))
    old = "for block in self.blocks:"
    assert old in files["model.py"]
    edited = files["model.py"].replace(old, "for block in (*self.blocks[:7], self.blocks[6], self.blocks[8]):")
    with pytest.raises(VerificationError):
        check_text(deep(), Emission.of(cut(), MESH, train=True), Weights({}), files={**files, "model.py": edited})


def test_a_layer_that_is_not_built_is_named() -> None:
    emission = Emission.of(cut(), MESH, train=True)
    files = module_texts(emission.body(no_shape))
    wrong = files["model.py"].replace(f"range({LAYERS})", f"range({LAYERS - 1})")
    assert wrong != files["model.py"]
    checked._check_all_read(emission, no_shape, Texts(files, Path("emitted")))  # what runs see to
    with pytest.raises(VerificationError, match=rf"never reads h\.{LAYERS - 1}\."):
        checked._check_all_read(emission, no_shape, Texts({**files, "model.py": wrong}, Path("emitted")))


def test_layers_are_numbered_as_in_a_model_of_so_few() -> None:
    short = shorten(deep(), cut(), MESH, checked.KEPT)
    old_names, (source, pcg) = renumber(deep(), short.source, short.pcg)
    for graph in (source, pcg):
        names = {name for node in graph.params for name in sources_of(node)}
        numbers = {int(name.split(".")[1]) for name in names if name.startswith("h.")}
        assert numbers == set(range(len(numbers)))
        assert len(numbers) < LAYERS
    assert all(new == old for new, old in old_names.items())  # the last ones are left out


def test_a_layer_behind_those_left_out_moves_up() -> None:
    def named(*numbers: int) -> Graph:
        k = Builder()
        params = [k.param(f"h.{n}.{part}", floats(2)) for n in numbers for part in ("0.w", "1.b")]
        return k.graph({f"y{at}": k.relu(param) for at, param in enumerate([*params, k.param("tail.7.w", floats(2))])})

    old_names, (short,) = renumber(named(0, 1, 2, 3, 4), named(0, 1, 4))
    assert old_names["h.2.1.b"] == "h.4.1.b"
    assert old_names["tail.7.w"] == "tail.7.w"
    assert [node.attr("name") for node in short.params][4:] == ["h.2.0.w", "h.2.1.b", "tail.7.w"]


def test_a_model_of_axes_joined_is_built_by_one_rank_alone() -> None:
    """Its groups are made by all ranks, of which here is but one."""
    joint, mesh = cut_batch(stack(LAYERS, batch=8), axis="dp+tp", whole=True), Mesh.of(dp=2, tp=2, pp=2)
    emission = Emission.of(joint, mesh, train=True)
    files = module_texts(emission.body(no_shape))
    assert "dp_tp" in files["model.py"]
    checked._check_all_read(emission, no_shape, Texts(files, Path("emitted")))
