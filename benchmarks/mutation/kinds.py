"""What is made wrong in graphs: for each kind of change, every place of a program where it can be made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import permutations

import numpy as np

from benchmarks.mutation.edit import (
    Edit,
    attrs,
    before_its_move,
    constant,
    copy_of,
    declared,
    drop,
    first_blocks,
    halves_exchanged,
    multiplied,
    other,
    reordered,
    reversed_ranks,
    rounded,
    sum_times,
    then,
    twice,
)  # fmt: skip
from benchmarks.mutation.moved import (
    Places,
    backward,
    constants,
    doubled,
    dropped,
    exchange_reversed,
    identity,
    local,
    named,
    one,
    other_collective,
    other_storage,
    other_view,
    other_weight,
    ranks_reversed,
    sliced,
    summed,
    trainable,
    weights_exchanged,
    wrong_axis,
    wrong_dim,
)  # fmt: skip
from ir.graph import Graph
from ir.mesh import Mesh

FUNCTIONS = ("gelu", "relu", "silu", "tanh", "sigmoid")


# ---- Numbers ----


def _scaled(factors: Callable[[Mesh], Mapping[str, float]]) -> Callable[[Graph, Mesh], Places]:
    def places(g: Graph, mesh: Mesh) -> Places:
        for node in local(g):
            for what, factor in factors(mesh).items():
                yield one(node, then("scale", factor=factor), what)

    return places


def mean_count(g: Graph, mesh: Mesh) -> Places:
    """A mean as a sum times one over a number: of a rank, of a small run, one off, or right."""
    for node in named(g, "reduce_mean"):
        count = math.prod(node.operands[0].type.shape[dim] for dim in node.attr("dims"))
        for wrong in sorted({count, count - 1, count // 2, 2, 4, *(count // a.size for a in mesh.axes)} - {0}):
            yield one(node, partial(sum_times, node.attrs, 1 / wrong), wrong)


def other_number(g: Graph, mesh: Mesh) -> Places:
    """A factor, an offset, a scale or an epsilon that is a little off, or doubled."""
    for node in local(g):
        for name in ("factor", "offset_by", "scale", "eps", "exponent"):
            if name in node.attrs:
                for times in (1 + 1e-6, 2.0, 0.1):
                    yield one(node, attrs(**{name: node.attr(name) * times}), f"{name} x {times}")


def other_count(g: Graph, mesh: Mesh) -> Places:
    """Another k of top-k."""
    return (one(node, attrs(k=node.attr("k") + by), by) for node in named(g, "top_k") for by in (-1, 1))


# ---- Constants ----


def constant_tail(g: Graph, mesh: Mesh) -> Places:
    """The last element of a constant, or the last of its second quarter."""
    for node, array in constants(g):
        for at in sorted({array.size - 1, array.size // 2 - 1}):
            changed = array.copy().reshape(-1)
            changed[at] = ~changed[at] if array.dtype == bool else changed[at] + 1
            yield one(node, constant(changed.reshape(array.shape)), at)


def constant_turned(g: Graph, mesh: Mesh) -> Places:
    """The second half of a constant reversed."""
    for node, array in constants(g):
        dim = int(np.argmax(array.shape))
        half = array.shape[dim] // 2
        order = [*range(half), *reversed(range(half, array.shape[dim]))]
        yield one(node, constant(array.take(order, axis=dim)))


def positions_shifted(g: Graph, mesh: Mesh) -> Places:
    """Every index of a table shifted."""
    for node, array in constants(g):
        if array.dtype.kind == "i":
            yield from (one(node, constant(array + by), by) for by in (1, 4, 8, 16, 48))


def mask_window(g: Graph, mesh: Mesh) -> Places:
    """A mask that sees less of what is before, or one token that is behind."""
    for node, array in constants(g):
        if array.dtype == bool:
            size = array.shape[-1]
            for window in (size - 1, size // 2, 4, 2):
                yield one(node, constant(array & ~np.tri(size, k=-window, dtype=bool)), window)
            yield one(node, constant(array | np.tri(size, k=1, dtype=bool)), "ahead")


def constants_exchanged(g: Graph, mesh: Mesh) -> Places:
    """Two constants of one type exchanged, or one in the place of both."""
    found = constants(g)
    for number, (node, array) in enumerate(found):
        for rival, values in found[number + 1 :]:
            if node.type == rival.type:
                yield Edit(f"{node.name} and {rival.name}", {node: constant(values), rival: constant(array)})
                yield one(node, constant(values), rival.name)


# ---- Attention, indices ----


def causal(g: Graph, mesh: Mesh) -> Places:
    """Causal attention for whole, and whole for causal."""
    return (one(node, attrs(causal=not node.attr("causal"))) for node in named(g, "attention"))


def offset_dropped(g: Graph, mesh: Mesh) -> Places:
    """An operator declared without its offset: no rank counts from where its shard begins."""
    for name in sorted({node.op.name for node in g.nodes if node.op.offset_loop is not None}):
        # all of them, since equal layers are told apart by names of operators, not by their declarations
        yield Edit(f"all {name}", dict.fromkeys(named(g, name), declared(offset_loop=None)))


def first_block(g: Graph, mesh: Mesh) -> Places:
    """Every rank takes the first block of what is cut: of positions, a mask, a sequence, a weight."""
    for node in named(g, "partition"):
        size = mesh.size(node.attr("axis"))
        if size > 1:
            yield one(node, partial(first_blocks, node.attr("dim"), size))


def inputs_exchanged(g: Graph, mesh: Mesh) -> Places:
    """Two inputs of one type."""
    for node in g.inputs:
        for rival in g.inputs:
            if node is not rival and node.type == rival.type:
                yield one(node, partial(copy_of, rival), rival.name)


# ---- Movement ----


def slice_moved(g: Graph, mesh: Mesh) -> Places:
    """A slice that begins one later, earlier, or a whole length away."""
    for node in named(g, "slice"):
        start, stop = node.attr("start"), node.attr("stop")
        for by in (-1, 1, stop - start, start - stop):
            if start + by >= 0 and stop + by <= node.operands[0].type.shape[node.attr("dim")]:
                yield one(node, attrs(start=start + by, stop=stop + by), by)


def other_chunk(g: Graph, mesh: Mesh) -> Places:
    """Another chunk."""
    for node in named(g, "chunk"):
        yield from (one(node, attrs(index=i), i) for i in range(node.attr("parts")) if i != node.attr("index"))


def concat_order(g: Graph, mesh: Mesh) -> Places:
    """Parts joined in another order."""
    for node in named(g, "concat"):
        count = len(node.operands)
        yield one(node, reordered(*reversed(range(count))))
        yield one(node, reordered(1, 0, *range(2, count)))


def permute_order(g: Graph, mesh: Mesh) -> Places:
    """Another permutation that gives the same shape."""
    for node in named(g, "permute"):
        shape = node.operands[0].type.shape
        for perm in permutations(range(len(shape))):
            if perm != node.attr("perm") and tuple(shape[i] for i in perm) == node.type.shape:
                yield one(node, attrs(perm=perm), perm)


def reshape_for_permute(g: Graph, mesh: Mesh) -> Places:
    """A reshape where a permutation is meant."""
    return (one(node, other("reshape", shape=node.type.shape)) for node in named(g, "permute"))


# ---- Operators ----


def other_function(g: Graph, mesh: Mesh) -> Places:
    """Another function of elements."""
    for node in named(g, *FUNCTIONS):
        for name in FUNCTIONS:
            if name != node.op.name:
                yield one(node, other(name), name)


def gelu_variant(g: Graph, mesh: Mesh) -> Places:
    """The other gelu."""
    for node in named(g, "gelu"):
        yield one(node, attrs(approximate="none" if node.attr("approximate") == "tanh" else "tanh"))


def operator_exchanged(g: Graph, mesh: Mesh) -> Places:
    """A difference for a sum, a maximum for a mean, another normalisation."""
    for node in named(g, "add", "sub", "mul"):
        name = {"add": "sub", "sub": "add", "mul": "add"}[node.op.name]
        yield one(node, other(name), name)
    for node in named(g, "avg_pool2d", "max_pool2d"):
        yield one(node, other("max_pool2d" if node.op.name == "avg_pool2d" else "avg_pool2d", **node.attrs))
    yield from (one(node, other("log_softmax")) for node in named(g, "softmax"))


def function_dropped(g: Graph, mesh: Mesh) -> Places:
    """An activation, a normalisation or a softmax left out."""
    names = (*FUNCTIONS, "softmax", "log_softmax", "layer_norm", "rms_norm", "batch_norm", "top_k", "neg", "scale")
    return (one(node, drop) for node in named(g, *names))


def term_dropped(g: Graph, mesh: Mesh) -> Places:
    """A bias or a residual left out: the layer then is, too, where the other term remains."""
    for node in named(g, "add"):
        yield one(node, drop, "second term")
        yield one(node, lambda k, n, x: x[1], "first term")


def term_doubled(g: Graph, mesh: Mesh) -> Places:
    """A bias or a residual added twice."""
    return (one(node, twice) for node in named(g, "add"))


def layer_twice(g: Graph, mesh: Mesh) -> Places:
    """An operator applied to its own result again."""
    for node in local(g):
        if node.op.name != "add" and node.operands[0].type == node.type:
            yield one(node, twice)


def sign(g: Graph, mesh: Mesh) -> Places:
    """A sign."""
    return (one(node, then("neg")) for node in local(g))


def operands_exchanged(g: Graph, mesh: Mesh) -> Places:
    """Two operands of one type exchanged, where their order counts."""
    for node in local(g):
        if len(node.operands) > 1 and node.op.name not in ("add", "mul", "concat"):
            for i in range(len(node.operands) - 1):
                if node.operands[i].type == node.operands[i + 1].type and node.operands[i] is not node.operands[i + 1]:
                    order = list(range(len(node.operands)))
                    order[i : i + 2] = i + 1, i
                    yield one(node, reordered(*order), i)


def before_reduce(g: Graph, mesh: Mesh) -> Places:
    """An operator on the terms of a sum that is still to be taken."""
    for node in local(g):
        moved = node.operands[0]
        if moved.op.name in ("reduce", "reduce_scatter", "combine", "all_gather", "all_to_all"):
            yield one(node, before_its_move, moved.op.name)


def cast(g: Graph, mesh: Mesh) -> Places:
    """Half precision, and back."""
    for node in local(g):
        yield one(node, rounded)


def convolution(g: Graph, mesh: Mesh) -> Places:
    """Another dilation, or padding that is uneven, of the same shape."""
    for node in named(g, "conv2d"):
        size = node.operands[1].type.shape[2:]
        p, d = node.attr("padding"), node.attr("dilation")
        wider = tuple(a + b * (s - 1) // 2 for a, b, s in zip(p, d, size, strict=True))
        if size != (1, 1):
            yield one(node, attrs(padding=wider, dilation=tuple(2 * b for b in d)), "dilation")
    for node in named(g, "max_pool2d", "avg_pool2d"):
        if node.attr("padding") == (1, 1) and node.attr("kernel") == (3, 3):
            yield one(node, attrs(kernel=(1, 1), padding=(0, 0)), "kernel")


def convolution_groups(g: Graph, mesh: Mesh) -> Places:
    """Input or output channels of a convolution in another order."""
    for node in named(g, "conv2d"):
        for number in (0, 1):
            dim = 0 if number == 0 and node.operands[0].type.shape[0] > 1 else 1
            half = node.operands[number].type.shape[dim] // 2
            if half and node.operands[number].type.shape[dim] % 2 == 0:
                yield one(node, partial(halves_exchanged, number, dim), number)


# ---- What is returned ----


def outputs_exchanged(g: Graph, mesh: Mesh) -> Places:
    """Two outputs, or two updates, of one type."""
    for what, pairs in (("outputs", g.outputs), ("updates", g.updates)):
        for name, node in pairs:
            for rival, value in pairs:
                if name < rival and node.type == value.type:
                    names = {each: {name: rival, rival: name}.get(each, each) for each, _ in pairs}
                    yield Edit(f"{name} and {rival}", **{what: names})  # type: ignore[arg-type]  # either


def update_dropped(g: Graph, mesh: Mesh) -> Places:
    """A buffer that is not overwritten, or keeps its old value."""
    for name, node in g.updates:
        yield Edit(name, updates={other: other for other, _ in g.updates if other != name})
        yield one(node, drop, "the old value alone")


KINDS: Mapping[str, Callable[[Graph, Mesh], Places]] = {
    "axis of a collective": wrong_axis,
    "dim of a partition or combine": wrong_dim("partition", "combine"),
    "dim of an all-gather or reduce-scatter": wrong_dim("all_gather", "reduce_scatter"),
    "reduce dropped": dropped("reduce", "reduce_replicate"),
    "reduce doubled": doubled("reduce", "reduce_replicate"),
    "replicate dropped": dropped("replicate"),
    "replicate doubled": doubled("replicate"),
    "partition or combine dropped": dropped("partition", "combine"),
    "gather or exchange dropped": dropped("all_gather", "reduce_scatter", "all_to_all"),
    "all-to-all reversed": exchange_reversed,
    "another collective": other_collective,
    "ranks in reverse": ranks_reversed,
    "gradient not summed over ranks": backward(identity, "backward", "replicate", "reduce_replicate"),
    "gradient sliced, not summed": backward(sliced, "backward", "all_gather"),
    "gradient summed again": backward(summed, "backward", "reduce"),
    "gradient over-scaled by a degree": backward(multiplied, "backward"),
    "gradient's ranks in reverse": backward(reversed_ranks, "backward"),
    "another weight": other_weight,
    "weights exchanged": weights_exchanged,
    "another view of a weight": other_view,
    "stored otherwise": other_storage,
    "trainable flag": trainable,
    "scaled by a degree": _scaled(lambda mesh: {a.name: a.size for a in mesh.axes if a.size > 1}),
    "scaled by one over a degree": _scaled(lambda mesh: {a.name: 1 / a.size for a in mesh.axes if a.size > 1}),
    "scaled by a special number": _scaled(
        lambda mesh: {str(v): v for v in (2.0**31, 2.0**31 - 1, 1 + 2.0**-23, -1.0, 1e-30)}
    ),
    "count of a mean": mean_count,
    "factor, scale or epsilon": other_number,
    "k of top-k": other_count,
    "tail of a constant": constant_tail,
    "half of a constant reversed": constant_turned,
    "positions shifted": positions_shifted,
    "window of a mask": mask_window,
    "constants exchanged": constants_exchanged,
    "causal flag": causal,
    "offset not shifted on a cut": offset_dropped,
    "first block on every rank": first_block,
    "inputs exchanged": inputs_exchanged,
    "slice moved": slice_moved,
    "another chunk": other_chunk,
    "order of a concat": concat_order,
    "another permutation": permute_order,
    "reshape for a permutation": reshape_for_permute,
    "another function": other_function,
    "variant of gelu": gelu_variant,
    "another operator": operator_exchanged,
    "function dropped": function_dropped,
    "bias or residual dropped": term_dropped,
    "bias or residual doubled": term_doubled,
    "operator doubled": layer_twice,
    "sign": sign,
    "operands exchanged": operands_exchanged,
    "operator before its collective": before_reduce,
    "cast to half and back": cast,
    "dilation or kernel": convolution,
    "channels in another order": convolution_groups,
    "outputs exchanged": outputs_exchanged,
    "update dropped": update_dropped,
}
