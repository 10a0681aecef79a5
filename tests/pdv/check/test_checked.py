"""The emitted text is run against its source: right texts pass, texts with one mistake do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.sharding import Shard
from ir.types import DType
from ir.verify import infer_shardings
from pdv.check import Checked, check_text, checked
from pdv.emit.emission import Emission, module_texts
from pdv.frontend.program import Weights
from tests.mistakes import plans
from tests.pdv.emit.graphs import cut_batch, floats, stack


def returned_whole(pcg: Graph) -> Graph:
    """The program with its outputs put together."""
    k = Builder()
    made: dict[Node, Node] = {}
    for node in pcg.nodes:
        made[node] = k.copy(node, tuple(made[x] for x in node.operands))
    outputs = {}
    for name, node in pcg.outputs:
        outputs[name] = made[node]
        states = zip(plans.MESH.axes, infer_shardings(pcg, plans.MESH)[node], strict=True)
        for axis, state in reversed(list(states)):
            if isinstance(state, Shard):
                outputs[name] = k.combine(outputs[name], dim=state.dim, axis=axis.name)
    return k.graph(outputs, {name: made[node] for name, node in pcg.updates}, pcg.name)


PLANS: dict[str, tuple[Callable[[], Graph], Callable[[], Graph]]] = {
    "transformer": (plans.transformer, lambda: returned_whole(plans.transformer_plan())),
    "convnet": (plans.convnet, lambda: returned_whole(plans.convnet_plan())),
}


def no_shape(name: str) -> tuple[int, ...]:
    raise AssertionError(f"the shape of {name} is known from the graph")


def texts(pcg: Graph, mesh: Mesh) -> dict[str, str]:
    return module_texts(Emission.of(pcg, mesh, train=True).body(no_shape))


def check(plan: str, files: Mapping[str, str] | None = None) -> Checked:
    source, pcg = PLANS[plan]
    return check_text(source(), Emission.of(pcg(), plans.MESH, train=True), Weights({}), files=files)


def check_alone(graph: Graph) -> Checked:
    return check_text(graph, Emission.of(graph, Mesh(()), train=True), Weights({}))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("few", [0, 1 << 20])
def test_the_right_text_passes(plan: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FEW_ELEMENTS", few)
    found = check(plan)
    assert found.ran
    assert found.ranks == 4
    assert found.largest_error < 1e-13
    assert ("full size" in found.statement) == bool(few)


# plan, file, what stands there, what is put in its place, what the error names
MISTAKES = (
    ("transformer", "model.py", "h = combine(h, 0, dp)", "h = combine(h, 1, dp)", "shape"),
    ("transformer", "model.py", "h = combine(h, 0, dp)", "h = combine(h, 0, tp)", "logits"),
    ("transformer", "model.py", "h = combine(h, 0, dp)", "h = h", "shape"),
    ("transformer", "model.py", "F.gelu(", "F.relu(", "output"),
    ("transformer", "model.py", "F.gelu(F.linear(all_gather(x, 1, tp), local(self.w1, dp), local(self.c1, dp)))",
     'F.gelu(F.linear(all_gather(x, 1, tp), local(self.w1, dp), local(self.c1, dp)), approximate="tanh")', "output"),
    ("transformer", "model.py", "tp.rank, scale=0.25", "0, scale=0.25", "output"),
    ("transformer", "model.py", "scale=0.25", "scale=0.5", "output"),
    ("transformer", "model.py", "wte, tp.rank, ", "wte, dp.rank, ", "output"),
    ("transformer", "model.py", "is_causal=True", "is_causal=False", "output"),
    ("transformer", "model.py", "1e-05", "1e-06", "output"),
    ("transformer", "model.py", "/ dp.size / tp.size", "/ dp.size", "mean"),
    ("transformer", "model.py", "reduce(reduce(x.mean((0, 1)) / dp.size / tp.size, tp), dp)",
     "reduce(x.mean((0, 1)) / dp.size / tp.size, tp)", "mean"),
    ("transformer", "model.py", 'weights["wqkv"].narrow(0, 16, 16)', 'weights["wqkv"].narrow(0, 15, 16)', "output"),
    ("transformer", "model.py", 'weights["bqkv"].narrow(0, 16, 16)', 'weights["bqkv"].narrow(0, 32, 16)', "bqkv"),
    ("transformer", "model.py", 'weights["w1"]', 'weights["w2"]', "run"),
    ("transformer", "model.py", 'weights["g"]', 'weights["b"]', "output"),
    ("transformer", "model.py", 'weights["wr"]', 'weights["wr"].permute(1, 0)', "output"),
    ("transformer", "model.py", 'weights["wr"]', 'weights["head"]', "head"),
    ("transformer", "model.py", '{"dp": 0, "tp": 1}', '{"dp": 1, "tp": 0}', "output"),
    ("transformer", "model.py", "local(self.wr, dp, tp)", "local(self.wr, dp)", "gradient of wr"),
    ("transformer", "model.py", "local(self.wr, dp, tp)", "local(self.wr, tp)", "gradient of wr"),
    ("transformer", "model.py", "local(self.wr, dp, tp)", "self.wr", "local()"),
    ("transformer", "model.py", "wte = local(self.wte, dp)", "wte = local(self.wte, dp).detach()", "gradient"),
    ("transformer", "model.py", " + local(self.bo, dp, tp)  #", " + local(self.bo, dp, tp) / tp.size  #", "output"),
    ("transformer", "model.py", "x = x + h\n", "x = x + h + h\n", "output"),
    ("transformer", "model.py", "reduce_scatter(F.linear(h, local(self.w2, dp)), 1, tp)",
     "partition(F.linear(h, local(self.w2, dp)), 1, tp)", "output"),
    ("transformer", "model.py", "wte), 2, 1, tp)", "wte), 1, 1, tp)", "shape"),
    ("transformer", "model.py", 'mesh["dp"], mesh["tp"]', 'mesh["tp"], mesh["dp"]', ""),
    ("transformer", "model.py", '{"dp": 2, "tp": 2}', '{"dp": 2, "tp": 4}', "wrong-world-size"),
    ("convnet", "model.py", "dp.size * tp.size), dp), tp)  # [6]", "dp.size), dp), tp)", "output"),
    ("convnet", "model.py", "self.running * 0.9 + mean * 0.1",
     "self.running * 0.1 + mean * 0.9", "new value of running"),
    ("convnet", "model.py", "overwrite(self.running, self.running * 0.9",
     "overwrite(self.running, vars(self).setdefault('first', self.running.clone()) * 0.9", "second call"),
    ("convnet", "model.py", "x = F.relu(x)\n", "x = x\n", "output"),
    ("convnet", "model.py", "padding=1", "padding=0", "output"),
    ("convnet", "model.py", 'mesh.buffer(weights["running"])', 'mesh.parameter(weights["running"])', "DTensor"),
    ("convnet", "parallel.py", "lambda g: _all_reduce(g, axis))", "_same)", "gradient"),
    ("transformer", "parallel.py", "lambda t: _all_reduce(t, axis), _same",
     "lambda t: _all_reduce(t, axis), lambda g: _all_reduce(g, axis)", "gradient"),
    ("transformer", "parallel.py", "lambda g: _reduce_scatter(g, dim, axis)",
     "lambda g: own_block(g, dim, axis)", "gradient"),
    ("transformer", "parallel.py", "axis.rank * block, block", "(axis.size - 1 - axis.rank) * block, block", ""),
    ("transformer", "operators.py", "ids = ids - first", "ids = ids - block", "output"),
    ("transformer", "runtime.py", "stored = stored.cut(cuts[axis.name], axis)", "stored = stored", ""),
    (
        "transformer", "buckets.py", "all_reduce_steps(self.flat, [axis.of_sums for axis in self.leaves[0].axes])",
        "iter(())", "gradient",
    ),
    ("transformer", "gradients.py", "tuple(x for x in axes if x.size > 1)", "axes[:1]", "gradient"),
    ("transformer", "buckets.py", "torch.split(self.flat, ", "torch.split(self.flat.flip(0), ", "gradient"),
)  # fmt: skip


@pytest.mark.parametrize(("plan", "file", "old", "new", "named"), MISTAKES)
def test_one_mistake_in_the_text_is_caught(plan: str, file: str, old: str, new: str, named: str) -> None:
    _, pcg = PLANS[plan]
    right = texts(pcg(), plans.MESH)
    wrong = right[file].replace(old, new, 1)
    assert wrong != right[file], f"{file} has no {old}"
    with pytest.raises(VerificationError) as caught:
        check(plan, {**right, file: wrong})
    assert caught.value.check == "text"
    assert named in str(caught.value)


def test_ranks_that_call_different_collectives_are_named() -> None:
    right = texts(PLANS["transformer"][1](), plans.MESH)
    text = right["model.py"].replace("x = x + h\n", "x = x + h if tp.rank else x + reduce(h, tp)\n")
    with pytest.raises(VerificationError, match=r"over tp, rank \d calls \w+"):
        check("transformer", {**right, "model.py": text})


# ---- Blocks, views and edits, at small sizes ----


def wide_stack() -> Graph:
    return stack(3, batch=16, sequence=64, width=64, heads=8)


def cut_stack() -> tuple[Graph, Mesh]:
    return cut_batch(wide_stack()), Mesh.of(dp=2)


def small_check(files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Checked:
    monkeypatch.setattr(checked, "FEW_ELEMENTS", 0)
    return check_text(wide_stack(), Emission.of(*cut_stack(), train=True), Weights({}), files=files)


def test_equal_blocks_are_run_at_equal_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = texts(*cut_stack())
    assert "nn.ModuleList(Block(" in files["model.py"]
    found = small_check(files, monkeypatch)
    assert found.sizes == "scaled-down sizes"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("is_causal=True", "is_causal=False"),
        ("h.flatten(2)", "h.flatten(2) * 1.0001"),
        ("range(3)", "range(2)"),
        ('f"h.{i}"', 'f"h.{max(i, 1)}"'),
    ],
)
def test_an_edit_is_carried_to_small_sizes(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = texts(*cut_stack())
    edited = files["model.py"].replace(old, new, 1)
    assert edited != files["model.py"]
    with pytest.raises(VerificationError):
        small_check({**files, "model.py": edited}, monkeypatch)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("buckets.py", "self._steps = x, all_reduce_steps(x.view(-1), axes)", "self._steps = x, iter(())"),
        ("losses.py", "(totals[0] / weights).sum()", "(totals[0] / weights).sum() / 2"),
        ("training.py", "share.backward()", "(2 * share).backward()"),
        ("training.py", "return whole()", "return 2 * whole()"),
        ("training.py", "map_tensors(batch, partial(own_rows, axes=axes))", "batch"),
        ("parallel.py", "x.narrow(dim, axis.rank * block, block)", "x.narrow(dim, 0, block)"),
    ],
)
def test_a_mistake_in_the_training_step_is_caught(
    file: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = texts(*cut_stack())
    wrong = files[file].replace(old, new)
    assert wrong != files[file]
    with pytest.raises(VerificationError):
        small_check({**files, file: wrong}, monkeypatch)


def test_an_edit_that_changes_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = texts(*cut_stack())
    more = "        # a comment\n        size = ids.size(0)\n        x = self."
    lines = files["model.py"].replace("        x = self.", more)
    renamed = lines.replace("q = q.transpose(1, 2)", "heads = q\n        q = heads.transpose(1, 2)")
    assert small_check({**files, "model.py": renamed}, monkeypatch).ran


def test_what_cannot_be_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FEW_ELEMENTS", 0)
    monkeypatch.setattr(checked, "MOST_ELEMENTS", 0)
    found = check("transformer")
    assert not found.ran
    assert found.statement.startswith("the emitted text was not run: ")


def test_inference_stores_what_weights_alone_make() -> None:
    k = Builder()
    x, w, s = k.input("x", floats(4, 8)), k.param("w", floats(8, 8)), k.param("s", floats(8))
    graph = k.graph({"y": k.linear(x, k.mul(w, s))})
    k = Builder()
    x = k.partition(k.input("x", floats(4, 8)), dim=0, axis="dp")
    w, s = (k.param(name, floats(*shape)) for name, shape in (("w", (8, 8)), ("s", (8,))))
    y = k.combine(k.linear(x, k.replicate(k.mul(w, s), axis="dp")), dim=0, axis="dp")
    found = check_text(graph, Emission.of(k.graph({"y": y}), Mesh.of(dp=2), train=False), Weights({}))
    assert found.statement.endswith("outputs within 1e-09 of the source's")


def test_low_precision_is_run_in_float64() -> None:
    k = Builder()
    half = floats(4, 8).__class__((4, 8), DType.BF16)
    graph = k.graph({"y": k.cast(k.gelu(k.cast(k.input("x", half), dtype="f32")), dtype="bf16")})
    assert check_alone(graph).largest_error < 1e-14


def test_what_is_zero_but_for_rounding_passes() -> None:
    k = Builder()
    normal = k.layer_norm(k.mul(k.input("x", floats(4, 8)), k.param("w", floats(8))), eps=1e-5)
    graph = k.graph({"zero": k.reduce_sum(normal, dims=(1,), keepdim=False)})
    assert check_alone(graph).ran


def positions(*, cut: bool) -> Graph:
    """A table of 9 rows and one of 64, both indexed by the same constant; the larger one cut by rows, or not."""
    k = Builder()
    ids = k.const(np.arange(8, dtype=np.int64), "ids")
    few, many = (k.param(name, floats(size, 12)) for name, size in (("few", 9), ("many", 64)))
    x = k.linear(k.input("x", floats(4, 8, 12)), k.param("w", floats(16, 12)))
    first = k.linear(k.embedding(few, ids), k.param("v", floats(16, 12)))
    if not cut:
        return k.graph({"y": k.add(x, first), "z": k.embedding(many, ids)})
    second = k.embedding(k.partition(many, dim=0, axis="a"), k.replicate(ids, axis="a"))
    y = k.combine(k.partition(k.add(x, first), dim=1, axis="a"), dim=1, axis="a")  # four positions at least
    return k.graph({"y": y, "z": k.reduce(second, axis="a")})


def test_indices_are_the_same_in_all_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FEW_ELEMENTS", 0)
    found = check_text(positions(cut=False), Emission.of(positions(cut=True), Mesh.of(a=2), train=False), Weights({}))
    assert found.sizes == "scaled-down sizes"


def test_rounding_that_grows_with_values_passes() -> None:
    k = Builder()
    x = k.input("x", floats(6, 8, 24))
    heads = k.permute(k.reshape(k.linear(x, k.param("w", floats(24, 24))), shape=(6, 8, 4, 6)), perm=(0, 2, 1, 3))
    heads = k.scale(heads, factor=3e4)
    graph = k.graph({"y": k.attention(heads, heads, heads, causal=True, scale=6**-0.5)})
    assert check_alone(graph).ran


def test_a_source_without_numbers_is_said() -> None:
    k = Builder()
    graph = k.graph({"y": k.log(k.neg(k.exp(k.input("x", floats(4, 4)))))})
    found = check_alone(graph)
    assert not found.ran
    assert "no numbers" in found.statement


def test_a_choice_between_equals_is_said() -> None:
    """Which of equal elements are the largest is the library's own affair."""
    k = Builder()
    x = k.input("x", floats(4, 4))
    graph = k.graph({"y": k.top_k(k.sub(x, x), k=1)})
    found = check_alone(graph)
    assert not found.ran
    assert "between equals" in found.statement
    graph = k.graph({"y": k.top_k(x, k=1)})
    assert check_alone(graph).ran


def test_what_the_largest_are_chosen_from_stays_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FEW_ELEMENTS", 0)
    k = Builder()
    graph = k.graph({"y": k.top_k(k.input("x", floats(8, 8)), k=3)})
    assert check_alone(graph).ran


@pytest.mark.parametrize("mistaken", [False, True])
def test_inference_that_moves_a_buffer_is_run_twice(*, mistaken: bool) -> None:
    """Beside weights that are made of others when the package is written."""
    k = Builder()
    x, w, s = k.input("x", floats(4, 8)), k.param("w", floats(8, 8)), k.param("s", floats(8))
    last = k.param("last", floats(8), trainable=False)
    y = k.add(k.linear(x, k.mul(w, s)), last)
    graph = k.graph({"y": y}, {"last": k.scale(last, factor=0.5)})
    emission = Emission.of(graph, Mesh(()), train=False)
    files = module_texts(emission.body(no_shape))
    assert "overwrite(" in files["model.py"]
    if mistaken:
        files["model.py"] = files["model.py"].replace("overwrite(self.last, ", "overwrite(self.last.clone(), ")
        with pytest.raises(VerificationError, match="the new value of last"):
            check_text(graph, emission, Weights({}), files=files)
    else:
        assert check_text(graph, emission, Weights({}), files=files).ran


VIEWS: dict[str, Callable[[Builder, Node, Node], Node]] = {
    "turned": lambda k, x, last: k.linear(x, k.permute(last, perm=(1, 0))),
    "parts": lambda k, x, last: k.mul(k.linear(x, k.chunk(last, dim=0, parts=2, index=1)),
                                      k.exp(k.linear(x, k.chunk(last, dim=0, parts=2, index=0)))),
    "returned": lambda k, x, last: last,
}  # fmt: skip


@pytest.mark.parametrize("read", VIEWS.values(), ids=list(VIEWS))
def test_what_shows_a_buffer_shows_its_old_values(read: Callable[[Builder, Node, Node], Node]) -> None:
    """``transpose`` and ``chunk`` share the memory of a buffer, which is overwritten before they are read."""
    k = Builder()
    x, w, last = k.input("x", floats(8, 8)), k.param("w", floats(8, 8)), k.param("last", floats(8, 8), trainable=False)
    y = k.linear(x, w)
    moved = k.scale(k.add(last, k.linear(k.permute(y, perm=(1, 0)), k.permute(y, perm=(1, 0)))), factor=0.5)
    late = k.reduce_sum(moved, dims=(0, 1), keepdim=False)  # behind the new value
    graph = k.graph({"y": read(k, y, last), "z": k.mul(y, late)}, {"last": moved})
    assert check_alone(graph).ran


def test_a_convolution_of_several_maps_has_its_bias_as_a_vector() -> None:
    """Whose copy on all ranks has a name, being read twice: of a column, which sums read, and ``F.conv2d`` does not."""
    made = []
    for cut in (False, True):
        k = Builder()
        x, w = k.input("x", floats(4, 3, 6, 6)), k.param("w", floats(8, 3, 3, 3))
        b = k.param("b.column", floats(8, 1, 1), source="b", view=(("reshape", (8, 1, 1)),))
        if cut:
            x, w, b = k.partition(x, dim=0, axis="a"), k.replicate(w, axis="a"), k.replicate(b, axis="a")
        maps = [k.add(k.conv2d(each, w), b) for each in (x, k.scale(x, factor=0.5))]
        y = k.add(*maps)
        made.append(k.graph({"y": k.combine(y, dim=0, axis="a") if cut else y}))
    source, pcg = made
    assert check_text(source, Emission.of(pcg, Mesh.of(a=2), train=True), Weights({})).ran
