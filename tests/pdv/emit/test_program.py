"""model.py: equal blocks once, formatted, deterministic, safe under any names, right on one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ir.builder import Builder
from ir.errors import ModelError
from ir.evaluation.interpret import evaluate
from ir.graph import Graph
from ir.mesh import Mesh
from ir.types import DType, TensorType
from tests.pdv.emit.graphs import build, emitted, floats, random_weights, stack

ALONE = Mesh.of(dp=1)


def test_equal_blocks_are_written_once(tmp_path: Path) -> None:
    few, many = (emitted(stack(n), ALONE, tmp_path / f"stack{n}") for n in (2, 12))
    assert many.replace("range(12)", "range(2)") == few
    assert many.count("class ") == 2
    assert 'nn.ModuleList(Block(mesh, weights, f"h.{i}") for i in range(12))' in many


def test_a_block_reads_like_one_written_by_hand(tmp_path: Path) -> None:
    text = emitted(stack(2), ALONE, tmp_path / "stack")
    assert "        q, k, v = h.chunk(3, dim=2)  # [b, 8, 16]\n" in text
    assert "        q = q.unflatten(2, (4, 4)).transpose(1, 2)  # [b, 4, 8, 4]\n" in text
    assert "F.scaled_dot_product_attention(q, k, v, is_causal=True)" in text
    assert "F.linear(h, local(self.qkv_weight), local(self.qkv_bias))" in text


def test_files_are_formatted_and_free_of_lint(tmp_path: Path) -> None:
    emitted(stack(3), ALONE, tmp_path / "stack_pdv")
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--isolated", "--line-length=120", str(tmp_path / "stack_pdv/model.py")]
    for command in (["format", "--check"], ["check", "--select=E,F,W,I,B,C4,UP,SIM,RUF"]):
        done = subprocess.run([*ruff, *command, *settings], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_two_emissions_are_byte_identical(tmp_path: Path) -> None:
    for name in ("a", "b"):
        emitted(stack(2), Mesh.of(dp=2), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "__init__.py", "accumulate.py", "buckets.py", "calls.py", "checkpoints.py", "compiled.py", "dtensors.py",
        "exits.py", "gradients.py", "launched.py", "losses.py", "meetings.py", "model.py", "named.py",
        "optimizers.py", "parallel.py", "plan.json", "refused.py", "remembered.py", "rounding.py", "runtime.py",
        "scaled.py", "states.py", "steps.py", "stored.py", "training.py", "weights.safetensors",
    ]  # fmt: skip
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_any_batch_size_runs_and_the_state_dict_is_the_source(tmp_path: Path) -> None:
    graph = stack(2)
    emitted(graph, ALONE, tmp_path / "stack_pdv")
    model = build(tmp_path / "stack_pdv")
    assert model(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 32)
    weights = random_weights(graph)
    state = model.full_state_dict()
    assert sorted(state) == list(weights.names)
    for name in weights.names:
        np.testing.assert_array_equal(state[name].numpy(), weights.load(name))


HOSTILE = [
    'a"b',
    "it's",
    "line\nbreak",
    "class",
    "{prefix}",
    '"""',
    "\\",
    "né",
    "forward",
    "self",
    "",
    "0",
    "h.0.1",
    "train",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(name: str, tmp_path: Path) -> None:
    k = Builder()
    x = k.input(name, floats(4, 3))
    y = k.linear(x, k.param(name, floats(3, 3)))
    y = k.linear(y, k.param(name + ".", floats(3, 3)))
    graph = k.graph({name: y}, name=name)
    emitted(graph, ALONE, tmp_path / "hostile_pdv")
    value = torch.randn(4, 3)
    weights = random_weights(graph)
    expected = value.numpy() @ weights.load(name).T @ weights.load(name + ".").T
    np.testing.assert_allclose(build(tmp_path / "hostile_pdv")(value).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_hostile_block_names(tmp_path: Path) -> None:
    k = Builder()
    x = k.input("x", floats(4, 3))
    h = x
    for i in range(9):
        h = k.tanh(k.linear(h, k.param(f'l"{{{i}}}\n.w"', floats(3, 3))))
    graph = k.graph({"y": h})
    text = emitted(graph, ALONE, tmp_path / "hostile_pdv")
    assert text.count("class ") == 2
    value = torch.randn(4, 3)
    expected = value
    for i in range(9):
        expected = torch.tanh(expected @ torch.from_numpy(random_weights(graph).load(f'l"{{{i}}}\n.w"')).T)
    torch.testing.assert_close(build(tmp_path / "hostile_pdv")(value), expected)


def test_names_that_do_not_line_up_go_into_a_table(tmp_path: Path) -> None:
    k = Builder()
    h = k.input("x", floats(4, 3))
    names = [f"val{i * i}" for i in range(9)]
    for name in names:
        h = k.tanh(k.linear(h, k.param(name, floats(3, 3))))
    text = emitted(k.graph({"y": h}), ALONE, tmp_path / "table_pdv")
    assert "BLOCK_NAMES = (\n" in text
    assert build(tmp_path / "table_pdv")(torch.randn(4, 3)).shape == (4, 3)


def test_axes_that_python_or_torch_needs_are_renamed(tmp_path: Path) -> None:
    k = Builder()
    x = k.partition(k.input("x", floats(4, 3)), dim=0, axis="train")
    y = k.linear(x, k.replicate(k.param("w", floats(3, 3)), axis="train"))
    text = emitted(k.graph({"y": y}), Mesh.of(train=2), tmp_path / "axes_pdv")
    assert 'mesh["train_"]' in text
    assert build(tmp_path / "axes_pdv")(torch.randn(4, 3)).shape == (4, 3)


def transposed_tie() -> Graph:
    k = Builder()
    x = k.input("x", floats(4, 3))
    one = k.param("w", floats(3, 3))
    other = k.param("w", floats(3, 3), view=(("permute", (1, 0)),))
    return k.graph({"y": k.linear(k.linear(x, one), other)})


def test_a_weight_tied_to_its_transpose_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="w is read both as"):
        emitted(transposed_tie(), ALONE, tmp_path)


def test_parts_of_one_stored_tensor_are_parameters_of_their_own(tmp_path: Path) -> None:
    k = Builder()
    x = k.input("x", floats(4, 3))
    parts = [k.param(f"w.{i}", floats(3, 3), source="w", view=(("chunk", 0, 2, i),)) for i in range(2)]
    graph = k.graph({"y": k.add(*(k.linear(x, part) for part in parts))})
    stored = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    from pdv.emit.package import emit_package
    from pdv.frontend.program import Weights

    folder = tmp_path / "parts_pdv"
    folder.mkdir()
    emit_package(graph, ALONE, {}, Weights({"w": lambda: stored}), folder)
    model = build(folder)
    value = torch.randn(4, 3)
    torch.testing.assert_close(model(value), value @ torch.from_numpy(stored[:3] + stored[3:]).T)
    assert len(list(model.parameters())) == 2
    np.testing.assert_array_equal(model.full_state_dict()["w"].numpy(), stored)


def test_what_is_not_read_of_a_stored_tensor_is_saved_as_it_was(tmp_path: Path) -> None:
    k = Builder()
    part = k.param("w.0", floats(3, 3), source="w", view=(("slice", 0, 2, 5, 6),))
    graph = k.graph({"y": k.linear(k.input("x", floats(4, 3)), part)})
    stored = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    from pdv.emit.package import emit_package
    from pdv.frontend.program import Weights

    folder = tmp_path / "part_pdv"
    folder.mkdir()
    emit_package(graph, ALONE, {}, Weights({"w": lambda: stored}), folder)
    model = build(folder)
    model(torch.randn(4, 3)).sum().backward()
    assert not model.full_gradients()["w"][[0, 1, 5]].any()
    with torch.no_grad():
        next(model.parameters()).fill_(7.0)
    expected = np.concatenate([stored[:2], np.full((3, 3), 7.0, np.float32), stored[5:]])
    np.testing.assert_array_equal(model.full_state_dict()["w"].numpy(), expected)


def test_masks_come_first_and_go_into_blocks(tmp_path: Path) -> None:
    k = Builder()
    x = k.input("x", floats(4, 8, 3))
    mask = k.input("mask", TensorType((8, 8), DType.F32))
    factor = k.exp(k.neg(mask))
    h = x
    for i in range(4):
        w = k.param(f"l.{i}.w", floats(3, 3))
        h = k.add(h, k.matmul(factor, k.tanh(k.linear(k.relu(h), w))))
    text = emitted(k.graph({"y": h}), ALONE, tmp_path / "mask_pdv")
    assert "        for block in self.blocks_from_1:\n            x = block(x, " in text
    assert build(tmp_path / "mask_pdv")(torch.randn(4, 8, 3), torch.zeros(8, 8)).shape == (4, 8, 3)


@pytest.mark.parametrize(
    ("places", "name"), [((0, 1, 2), "layers"), ((2, 3, 4), "layers_from_2"), ((0, 2, 4), "some_layers")]
)
def test_a_list_has_the_name_of_the_sources_where_layers_have_their_places(
    tmp_path: Path, places: tuple[int, ...], name: str
) -> None:
    """``model.layers[0]`` of layers that begin with the third would be another layer than the module's."""
    k = Builder()
    h = k.tanh(k.linear(k.input("x", floats(4, 3)), k.param("first", floats(3, 3))))
    for i in places:
        w, v = (k.param(f"body.layers.{i}.{each}", floats(3, 3)) for each in "wv")
        h = k.add(h, k.linear(k.tanh(k.linear(k.relu(h), w)), v))
    text = emitted(k.graph({"y": h}), ALONE, tmp_path / "listed_pdv")
    assert f"        self.{name} = nn.ModuleList(" in text
    build(tmp_path / "listed_pdv")(torch.ones(4, 3))


def test_what_all_blocks_read_keeps_its_name_in_the_loop(tmp_path: Path) -> None:
    """Nothing reads ``fixed`` behind the loop, which gives a value of its shape that only the last block passes on."""
    k = Builder()
    x = k.input("x", floats(4, 3))
    fixed = k.tanh(k.linear(x, k.param("fixed", floats(3, 3))))
    h = x
    for i in range(4):
        w, v, u = (k.param(f"l.{i}.{name}", floats(3, 3)) for name in "wvu")
        gate = k.tanh(k.linear(k.exp(k.neg(h)), w))
        h = k.tanh(k.linear(k.relu(k.linear(k.mul(gate, fixed), v)), u))
    graph = k.graph({"y": h, "gate": k.tanh(gate)})
    assert "        for block in self.blocks_from_1:\n" in emitted(graph, ALONE, tmp_path / "kept_pdv")
    weights, given = random_weights(graph), np.ones((4, 3))
    wanted = evaluate(
        graph, {"x": given, **{param.attr("name"): weights.load(param.attr("name")) for param in graph.params}}
    )
    found = build(tmp_path / "kept_pdv")(torch.ones(4, 3))
    for y, name in zip(found, ("y", "gate"), strict=True):
        np.testing.assert_allclose(y.detach().numpy(), wanted.gather()[name], rtol=1e-5)


def test_axes_may_be_called_like_variables(tmp_path: Path) -> None:
    k = Builder()
    x = k.partition(k.input("x", floats(4, 3)), dim=0, axis="x")
    y = k.linear(x, k.replicate(k.param("h", floats(3, 3)), axis="x"))
    y = k.add(k.tanh(y), y)
    emitted(k.graph({"y": k.combine(y, dim=0, axis="x")}), Mesh.of(x=2, h=1), tmp_path / "axes_pdv")
    assert build(tmp_path / "axes_pdv")(torch.randn(4, 3)).shape == (4, 3)


def test_the_emitted_program_is_the_golden_one(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    golden("emitted/stack.py.txt", emitted(stack(2), ALONE, tmp_path / "stack"))


def test_a_buffer_is_overwritten_with_a_value_that_is_also_returned(tmp_path: Path) -> None:
    k = Builder()
    x = k.input("x", floats(4, 3))
    mean = k.reduce_mean(x, dims=(0,), keepdim=False)
    buffer = k.param("running", floats(3), trainable=False)
    value = k.add(k.scale(buffer, factor=0.5), mean)
    graph = k.graph({"y": k.mul(x, value)}, {"running": value})
    emitted(graph, ALONE, tmp_path / "updates_pdv")
    model = build(tmp_path / "updates_pdv")
    start = torch.from_numpy(random_weights(graph).load("running"))
    inputs = torch.randn(4, 3)
    expected = start * 0.5 + inputs.mean(0)
    torch.testing.assert_close(model(inputs), inputs * expected)
    torch.testing.assert_close(model.full_state_dict()["running"], expected)
    assert not list(model.parameters())


def test_a_value_is_not_held_while_the_convolution_after_its_reader_runs(tmp_path: Path) -> None:
    k = Builder()
    x, w = k.input("x", floats(2, 4, 5, 5)), [k.param(f"w{i}", floats(4, 4, 3, 3)) for i in range(2)]
    names = [f"a_layer_that_fills_its_line.{name}" for name in ("mean", "spread", "weight", "bias")]
    vectors = [k.param(name, floats(4), trainable=index > 1) for index, name in enumerate(names)]
    h = k.batch_norm(k.conv2d(x, w[0], padding=(1, 1)), vectors[0], k.exp(vectors[1]), *vectors[2:], eps=1e-5)
    text = emitted(k.graph({"y": k.conv2d(k.relu(h), w[1])}), ALONE, tmp_path / "held_pdv")
    assert "x = F.relu(x)\n" in text
    assert "F.conv2d(F.relu(" not in text
    turned = k.conv2d(k.permute(h, perm=(0, 1, 3, 2)), w[1])
    text = emitted(k.graph({"y": turned}), ALONE, tmp_path / "turned_pdv")
    assert "F.conv2d(x.transpose(2, 3), " in text  # a view has no memory of its own


def test_axes_as_one_have_a_name_of_their_own(tmp_path: Path) -> None:
    """An axis that is called as two others together are keeps away from their name."""
    k = Builder()
    x = k.partition(k.input("x", floats(8, 4)), dim=0, axis="u+v")
    w = k.replicate(k.param("w", floats(6, 4)), axis="u+v")
    y = k.combine(k.linear(x, w), dim=0, axis="u+v")
    text = emitted(k.graph({"y": y}), Mesh.of(u=2, v=2, u_v=2), tmp_path / "joint_pdv")
    assert 'self.u_v = mesh["u", "v"]' in text
    assert "combine(F.linear(partition(x, 0, u_v), local(self.w, u_v)), 0, u_v)" in text
    assert 'make_mesh({"u": 2, "v": 2, "u_v_": 2}, device)' in text
    assert build(tmp_path / "joint_pdv")(torch.ones(8, 4)).shape == (8, 6)


def test_constants_are_cut_along_every_axis_of_a_joint_one(tmp_path: Path) -> None:
    k = Builder()
    x = k.partition(k.input("x", floats(8, 4)), dim=0, axis="u+v")
    c = k.partition(k.const(np.full((8, 4), 2, np.float32)), dim=0, axis="u+v")
    y = k.combine(k.mul(x, c), dim=0, axis="u+v")
    text = emitted(k.graph({"y": y}), Mesh.of(u=2, v=2), tmp_path / "cut_pdv")
    assert 'mesh.tensor(weights["constants.constant"], {"u": 0, "v": 0})' in text


def test_ids_of_a_table_that_is_a_constant_have_a_name(tmp_path: Path) -> None:
    k = Builder()
    table, ids = k.const(np.full((8, 4), 2, np.float32)), k.const(np.arange(3))
    y = k.add(k.embedding(table, ids), k.input("x", floats(3, 4)))
    text = emitted(k.graph({"y": y}), ALONE, tmp_path / "table_pdv")
    assert "F.embedding(self.constant_2, self.constant) + x" in text
