"""What exporters do to stored tensors that matters to training: equal ones merged, one written down as several copies,
what they computed of weights beforehand.

``mend`` takes it back, in the model as it was read, as far as that is known; origins/doubts.py finds what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import onnx_ir

from pdv.frontend.onnx.origins.doubts import EXPORT, OURS, module_path, some_of
from pdv.frontend.onnx.origins.equal import (
    drop_aliases,
    equal_pairs,
    first_call,
    may_be_calls,
    maybe_several,
    part_named,
    says_merged,
    trained_apart,
)
from pdv.frontend.onnx.origins.kinds import kind_by_use, part_statistics
from pdv.frontend.onnx.origins.left_out import put_back
from pdv.frontend.onnx.origins.made import Made
from pdv.frontend.onnx.origins.merged import lost_with_nodes, part_constants, part_nodes, part_unsaid, say_parted
from pdv.frontend.onnx.origins.proofs.norms import unfold_norms
from pdv.frontend.onnx.origins.proofs.proved import Stored, lost_equals, recover_proved
from pdv.frontend.onnx.origins.recovered import drop_unread, recover
from pdv.frontend.onnx.origins.signature import (
    Role,
    Signature,
    absent,
    array_of,
    missing_bias,
    turned,
    zeros,
)
from pdv.frontend.onnx.origins.stripped import have_back, say_left_out
from pdv.frontend.onnx.origins.unnamed import is_newer, is_of_torch, may_be_another, of_unknown_origin, was_constant
from pdv.passes.fold_constants import Array

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"  # metadata that torch.onnx.export writes on initializers
ANONYMOUS = ("onnx::", "val_", "/")  # what exporters call tensors that they computed
_LEAST = 64  # elements of a tensor, below which all of them tell whether its values are chance
_FLOATS = {onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16}


@dataclass
class Mended:
    """What was taken back.

    Attributes:
        merged: a tensor that the file has not -> the file's that it was merged into; None: it is zero, and left out.
        copies: a tensor of the file -> that of which it is a copy, and the order of its dims.
        made: a tensor of the file -> the parameters that it was made of.
        notes: all of it in words.
        doubts: what training would do without, in words.
        absent: parameters that the file has not, and that cannot be had back.
        untold: tensors of the file that nobody knows what they were made of -> what is not known, in words.
        held: all that the file has not, where constants alone hold what was computed of them; else none.
        shared: parameters that the file reads in the place of a constant, too, be it as another that is equal.
    """

    merged: dict[str, str | None] = field(default_factory=dict)
    copies: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    made: dict[str, Made] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    untold: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)


def mend(model: onnx_ir.Model, stored: Stored = MappingProxyType({})) -> Mended:
    """Separate what the exporter merged, and tie what it copied; changes the model.

    stored: the tensors of the module that was exported, by which is known what was computed of them.
    """
    found = Mended()
    if not is_of_torch(model):
        found.doubts += trained_apart(_trained(model), of_torch=False)
        return found
    own = {*model.graph.initializers}
    drop_aliases(model.graph)
    _put_back(model, found)
    signature = Signature.of(model.graph)
    if signature is not None:
        unsaid, hidden = part_unsaid(signature, model.graph, stored)
        found.merged |= unsaid
        found.absent += sorted(hidden)
        if unsaid:
            found.notes.append(
                f"{some_of(sorted(unsaid))} started out equal to others, and are parameters of their own here, by the "
                "weights that were given"
            )
        if stored:
            _prove(model.graph, signature, stored, found)
        _restore(model.graph, signature, found)
        parted = part_nodes(signature, model.graph)
        found.merged |= parted
        found.notes += say_parted(parted)
        _recover(model.graph, signature, found)
    else:
        _separate(model, found)
        back = have_back(model.graph)
        found.made |= back.made
        found.merged |= back.merged
        found.notes += back.notes
        found.doubts += back.doubts
    _tie(model.graph, found, told=signature is not None)
    if signature is None:
        _doubt(model, own, found)
    _rename(model.graph, signature, found)
    if signature is not None:
        constants = {_held_as(name, found) for name in part_constants(signature, model.graph)}
        found.shared += sorted(name for name in signature.targets if _held_as(name, found) in constants)
        lost, merged = {*absent(signature, model.graph)}, lost_with_nodes(signature, model.graph)
        lost |= lost_equals(model.graph, signature, stored, found.made.values())
        found.absent += sorted((lost | merged) - {*found.copies, *found.absent})
        missing = signature.targets - model.graph.initializers.keys()
        if not merged and not missing & signature.mentioned(model.graph):
            found.held += sorted(missing)
    return found


def _doubt(model: onnx_ir.Model, own: set[str], found: Mended) -> None:
    """What is not known of the file's ``own`` tensors, where nothing says which parameters there are."""
    stay = _trained(model)
    found.doubts += [*trained_apart(stay, of_torch=True), *maybe_several(model.graph, stay)]
    found.untold |= {name: what for name, what in of_unknown_origin(model.graph).items() if name in own}
    for name in [name for name in found.untold if is_newer(name)]:
        if kind_by_use(model.graph.initializers[name], model.producer_name or "")[0] != "PARAMETER":
            del found.untold[name]  # a constant of what is computed


def _put_back(model: onnx_ir.Model, found: Mended) -> None:
    back, lost = put_back(model.graph, ours=OURS in model.metadata_props)
    if back:
        found.notes.append(f"torch's exporter says and leaves out {some_of(back)}, which are put back here")
    if lost:
        found.doubts.append(
            f"torch's exporter leaves out {some_of(lost)}: training would do without. {EXPORT}, if it is to be trained "
            "with it"
        )


def _held_as(name: str, found: Mended) -> str:
    """The file's tensor that a parameter is."""
    while place := found.merged.get(name):
        name = place
    return name


def _restore(graph: onnx_ir.Graph, signature: Signature, found: Mended) -> None:
    """By the exporter's own words: biases of zero that it left out, and parameters that started out equal."""
    apart: dict[str, list[str]] = {}
    left_out: list[str] = []
    for role in list(signature.roles(graph)):
        node, name, own = role.node, role.parameter, graph.initializers.get(role.parameter)
        size = missing_bias(role)
        value = node.inputs[role.place] if role.place < len(node.inputs) else None
        if size is not None:
            if own is None:
                assert node.inputs[1] is not None, node
                own = zeros(name, size, node.inputs[1])
                graph.register_initializer(own)
                found.merged[name] = None
                left_out.append(name)
            node.resize_inputs(3)
            node.replace_input_with(2, own)
        elif value is not None and value.name != name and value.name in signature.targets:
            if own is None:
                own = onnx_ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
                graph.register_initializer(own)
                found.merged[name] = value.name
                apart.setdefault(value.name or "", []).append(name)
            node.replace_input_with(role.place, own)
    for name, names in apart.items():
        found.notes.append(_say_merged(name, array_of(graph.initializers[name]), names))
    if left_out:
        found.notes.append(say_left_out(left_out))


def _prove(graph: onnx_ir.Graph, signature: Signature, stored: Stored, found: Mended) -> None:
    norms = unfold_norms(graph, signature, stored)
    if norms:
        found.notes.append(
            f"{len(norms)} batch norms that were folded into convolutions ({some_of(norms)}) are layers again, by the "
            "weights that were given"
        )
    made, untold = recover_proved(graph, signature, stored)
    found.absent += sorted(untold)
    for name, (how, own) in made.items():
        found.made[name] = how
        found.merged |= dict.fromkeys(own, name)
    drop_unread(graph, made)
    if dropped := [f"{how.parameters[0]} with p={how.dropped[1]}" for how, _ in made.values() if how.dropped]:
        found.notes.append(
            f"dropout that the exporter drew once ({some_of([*dict.fromkeys(dropped)])}) is drawn in each step here"
        )
    if made:
        found.notes.append(
            f"tensors that the exporter computed beforehand ({some_of(list(made))}) are computed in each step here, of "
            "the parameters of which they are computed by the weights that were given"
        )


def _recover(graph: onnx_ir.Graph, signature: Signature, found: Mended) -> None:
    computed = []
    for name, (made, own) in recover(graph, signature).items():
        computed += [f"{name} of {some_of(own)}"] if made.steps and own else []
        found.made[name] = made
        found.merged |= dict.fromkeys(own, name)
        parts = own if made.rows is not None and not name.startswith(ANONYMOUS) else []
        if parts:
            found.notes.append(
                f"of {parts[0]} the file has the {max(made.rows or (0,)) + 1} rows that it reads, and these are the "
                "parameter here"
            )

    if computed:
        found.notes.append(
            f"tensors that the exporter computed beforehand ({some_of(computed)}) are computed in each step here, of "
            "the parameters that they were computed of, which are known but for rounding"
        )


def _rename(graph: onnx_ir.Graph, signature: Signature | None, found: Mended) -> None:
    """A transposed weight goes by the name that it has in the module, as it is there."""
    roles = _roles_of_paths(graph) if signature is None else signature.roles(graph)
    for role in list(roles):
        value = role.node.inputs[role.place] if role.place < len(role.node.inputs) else None
        known = value is None or not value.is_initializer() or value.name in found.copies
        if known or value is None or role.parameter in graph.initializers or not _is_anonymous(value):
            continue
        if role.turned and value.const_value is not None and len(value.const_value.shape) == 2:
            own = turned(value, role.parameter)
            graph.register_initializer(own)
            _turn_back(graph, value, own, (1, 0))
            found.copies[value.name or ""] = (role.parameter, (1, 0))
            found.merged[role.parameter] = value.name


def _roles_of_paths(graph: onnx_ir.Graph) -> Iterator[Role]:
    """Weights of linear layers, which torch's older exporter writes transposed, by the paths of their products."""
    for node in graph:
        path = (node.name or "").strip("/").split("/")
        if node.op_type == "MatMul" and len(path) > 1 and path[-1] == "MatMul":
            yield Role(node, 1, ".".join([*path[:-1], "weight"]), turned=True)


def _is_anonymous(value: onnx_ir.Value) -> bool:
    return (value.name or "").startswith(ANONYMOUS)


def _stored(graph: onnx_ir.Graph) -> list[onnx_ir.Value]:
    """Tensors of floats that may be parameters."""
    return [
        value
        for value in graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype in _FLOATS
        and value.metadata_props.get(KIND, "PARAMETER") == "PARAMETER"
        and len(value.const_value.shape) > 0
        and value.const_value.size > 1
        and not was_constant(value.name or "")
    ]


def _trained(model: onnx_ir.Model) -> list[onnx_ir.Value]:
    """What of a file that does not say so itself is a parameter."""
    producer, stored = model.producer_name or "", _stored(model.graph)
    return [value for value in stored if value.uses() and kind_by_use(value, producer)[0] == "PARAMETER"]


def _separate(model: onnx_ir.Model, found: Mended) -> None:
    """torch.onnx.export makes one tensor of all that start out equal, say every bias of zeros."""
    graph, says = model.graph, says_merged(model.graph)
    found.merged |= part_statistics(graph)  # behind what it leaves: equal tensors
    for value in _trained(model):
        by_module = _names_of_uses(list(value.uses()), says)
        if len(by_module) < 2:
            continue
        array = array_of(value)
        first = array.reshape(-1)[:_LEAST]
        if not (first == first[0]).all() or not (array == first[0]).all():
            continue
        names = []
        for name, uses in list(by_module.items())[1:]:
            is_said = "." in name and all(node.op_type == "Identity" for node, _ in uses)
            own = name if is_said and name not in graph.initializers else _own_name(graph, name, value.name or "")
            each = onnx_ir.Value(name=own, shape=value.shape, type=value.type, const_value=value.const_value)
            graph.register_initializer(each)
            for node, index in uses:
                if node.op_type == "Identity":
                    onnx_ir.convenience.replace_all_uses_with(node.outputs[0], each)
                else:
                    node.replace_input_with(index, each)
            found.merged[own] = value.name or ""
            names.append(own)
        found.notes.append(_say_merged(value.name or "", array, names))
        if not says and may_be_calls([node for uses in by_module.values() for node, _ in uses]):
            found.doubts.append(f"{value.name} may be of one layer that is called several times. {EXPORT}, if it is")
    for name, names in part_named(graph).items():
        found.merged |= dict.fromkeys(names, name)
        found.notes.append(_say_merged(name, array_of(graph.initializers[name]), names))


def _say_merged(name: str, array: Array, names: Sequence[str]) -> str:
    constant = f"{array.reshape(-1)[0]} throughout and " if (array == array.reshape(-1)[:1]).all() else ""
    return (
        f"{name} is {constant}read in {len(names) + 1} places, since the exporter merges equal weights: each of them "
        f"has a parameter of its own here ({some_of(names)})"
    )


def _names_of_uses(users: Sequence[Any], says: bool) -> dict[str, list[tuple[onnx_ir.Node, int]]]:
    """Uses by the module that they are of, as far as the file says: uses of one module are of one parameter.

    says: an Identity stands where another parameter was, as the older exporter leaves it.
    """
    found: dict[str, list[tuple[onnx_ir.Node, int]]] = {}
    firsts: dict[tuple[str, int], str] = {}
    for use in users:
        node = use.node
        if node.op_type == "Identity" and node.domain == "" and not node.outputs[0].is_graph_output():
            name = node.outputs[0].name or ""
        else:
            place = firsts.setdefault((first_call(node), use.idx), f"{node.outputs[0].name}.{use.idx}")
            name = "" if says else module_path(node) or place
        found.setdefault(name, []).append((node, use.idx))
    first = [name for name, uses in found.items() if all(node.op_type != "Identity" for node, _ in uses)]
    return {name: found[name] for name in [*first, *(name for name in found if name not in first)]}


def _own_name(graph: onnx_ir.Graph, module: str, merged: str) -> str:
    """What the parameter was probably called."""
    last = merged.rpartition(".")[2]
    wanted = module if module.endswith(f".{last}") else f"{module}.{last}"
    names = [wanted, *(f"{wanted}_{number}" for number in range(2, 1 << 16))]
    return next(name for name in names if name not in graph.initializers)


def _tie(graph: onnx_ir.Graph, found: Mended, *, told: bool) -> None:
    """A tied or turned weight is written down once for each way in which it is read.

    told: the file says which parameters there are.
    """
    tied: set[onnx_ir.Value] = set()
    for kept, value, perm in equal_pairs(sorted(_stored(graph), key=_is_anonymous)):
        if not (_is_anonymous(value) or _is_anonymous(kept)) or tied & {kept, value}:
            continue  # under two names of the module they are two parameters, which are equal at the start
        if not told and may_be_another(value, kept):
            found.absent.append(f"whether {kept.name} and {value.name}, which are equal, are one")
        _replace(graph, value, kept, perm, found)
        tied.add(value)


def _replace(
    graph: onnx_ir.Graph, value: onnx_ir.Value, kept: onnx_ir.Value, perm: tuple[int, ...], found: Mended
) -> None:
    _turn_back(graph, value, kept, perm)
    found.copies[value.name or ""] = (kept.name or "", perm)
    straight = perm == tuple(range(len(perm)))
    how = "a copy" if straight else f"a copy, its dims in the order {list(perm)},"
    found.notes.append(f"{value.name} is {how} of {kept.name}: they are one parameter here")


def _turn_back(graph: onnx_ir.Graph, value: onnx_ir.Value, kept: onnx_ir.Value, perm: tuple[int, ...]) -> None:
    """Read a stored tensor in this order of its dims in place of another one."""
    read = kept
    if perm != tuple(range(len(perm))):
        node = onnx_ir.Node("", "Transpose", [kept], [onnx_ir.AttrInt64s("perm", perm)], num_outputs=1)
        node.outputs[0].name = f"{value.name} of {kept.name}"
        graph.insert_before(next(iter(graph)), node)
        read = node.outputs[0]
    onnx_ir.convenience.replace_all_uses_with(value, read)


def stored_of(mended: Mended, values: Mapping[str, Array]) -> dict[str, Array]:
    """The file's tensors, of the program's: those that were merged are one, copies as what they are copies of."""
    own = {name: array for name, array in values.items() if name not in mended.merged}
    made = {name: how.of(values) for name, how in mended.made.items() if set(how.parameters) <= set(values)}
    copied = {name: values[kept].transpose(perm) for name, (kept, perm) in mended.copies.items() if kept in values}
    return own | made | copied
