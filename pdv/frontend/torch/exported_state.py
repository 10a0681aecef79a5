"""What an exported program stores, overwrites and returns.

Entry points: ``without_spare_names``, for `run_decompositions`, which fails where memory that is overwritten has two
names; ``memory_of``, what tells two names of one tensor; ``live_nodes``; ``check_overwritten``, ``check_constants``,
``check_words``; ``argument_names``; ``where_of``; ``unlogged``.
"""

from __future__ import annotations

import keyword
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx.experimental import symbolic_shapes
from torch.multiprocessing.reductions import StorageWeakRef

from ir.errors import ModelError
from ir.graph import View

_WRITTEN = {OutputKind.BUFFER_MUTATION: "buffer", OutputKind.PARAMETER_MUTATION: "parameter"}

Memory = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Storage, offset, shape and strides of a tensor."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """Which memory a tensor is, and how it is read; also of one without bytes (meta)."""
    return (storage_of(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def storage_of(tensor: torch.Tensor) -> int:
    """The number of the memory that a tensor, or a part of it, lies in."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def shared_names(program: ExportedProgram) -> list[tuple[str, ...]]:
    """Names of stored tensors that share memory, by the memory."""
    found: dict[int, list[str]] = {}
    for name, tensor in program.state_dict.items():
        found.setdefault(storage_of(tensor), []).append(name)
    return [tuple(names) for names in found.values() if len(names) > 1]


def other_names(program: ExportedProgram, read: Collection[str]) -> dict[str, tuple[str, View]]:
    """Further names of the tensors that are ``read``, of which each is all."""
    state = {name: memory_of(tensor) for name, tensor in program.state_dict.items()}
    by_memory = {memory: name for name, memory in state.items() if name in read}
    return {name: (by_memory[x], ()) for name, x in state.items() if name not in read and x in by_memory}


@contextmanager
def without_spare_names(program: ExportedProgram) -> Iterator[None]:
    """While this lasts, a name under which nothing is read shares its memory with no other.

    A module registered twice has all its tensors under two names; its program reads them by one.
    """
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    by_target = {str(spec.target): spec.arg.name for spec in program.graph_signature.input_specs if spec.target}
    spare = {name for names in shared_names(program) for name in names if by_target.get(name) not in read}
    state = program.state_dict
    kept = {name: state[name] for name in spare}
    state.update({name: _alike(tensor) for name, tensor in kept.items()})
    try:
        yield
    finally:
        state.update(kept)


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def check_constants(program: ExportedProgram) -> None:
    """Whether all constants have values: torch runs its kernels on what has none, and the process ends.

    Raises:
        ModelError: naming where one is read.
    """
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(
            program.constants.get(str(spec.target)), fake_tensor.FakeTensor
        ):
            nodes = program.graph.nodes
            readers = [where_of(node) for node in nodes if spec.arg.name in map(str, node.all_input_nodes)]
            raise ModelError(
                f"torch.export loses sight of a tensor that is read at {', '.join(readers[:3])}",
                "Tensors that operators of torch make",
                "Write it without data and set_: x.detach() for x.data",
            )


def live_nodes(program: ExportedProgram, *, updates: bool = True) -> set[torch.fx.Node]:
    """What outputs, and floating buffers' new values, depend on. Integer buffers only count steps."""
    by_name = {node.name: node for node in program.graph.nodes}
    stack = []
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument):
            node = by_name[spec.arg.name]
            if spec.kind is OutputKind.USER_OUTPUT or (
                updates and spec.kind is OutputKind.BUFFER_MUTATION and is_floating(node)
            ):
                stack.append(node)
    live: set[torch.fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def check_words(program: ExportedProgram, error: Exception) -> None:
    """Whether torch could not write a program, ``error``, for the names of its parts.

    Raises:
        ModelError: naming parameters of such parts.
    """
    words = [name for name in program.state_dict if any(map(keyword.iskeyword, name.split(".")))]
    if words and isinstance(error, SyntaxError):
        raise ModelError(
            f"torch cannot write a program whose parts are called like words of Python: {', '.join(words[:3])}",
            "Names of modules and parameters that variables may have",
            "Give them another name (class_ for class)",
        ) from error
    if isinstance(error, KeyError) and (taken := re.search(r"attribute '(\w+)' already exists", str(error))):
        names = [name for name in program.state_dict if taken[1] in name.split(".")]
        raise ModelError(
            f"torch cannot write a program with {', '.join(names[:3]) or taken[1]}: its class of programs has an "
            f"attribute {taken[1]!r} of its own",
            "Other names of parameters, buffers and modules",
            f"Give it another name ({taken[1]}s for {taken[1]})",
        ) from error


def check_overwritten(program: ExportedProgram, live: Collection[torch.fx.Node]) -> None:
    """What is overwritten is a buffer of floats, or counts steps and nothing reads it.

    An input that is overwritten is the caller's: the program leaves it as it was.

    Raises:
        ModelError: naming what is overwritten and would not be.
    """
    by_name = {node.name: node for node in program.graph.nodes}
    read = {
        str(spec.target): by_name[spec.arg.name] in live for spec in program.graph_signature.input_specs if spec.target
    }
    for spec in program.graph_signature.output_specs:
        if not isinstance(spec.arg, TensorArgument) or spec.kind not in _WRITTEN:
            continue
        node, target = by_name[spec.arg.name], str(spec.target)
        counts = not is_floating(node) and node not in live and not read.get(target)
        if spec.kind is OutputKind.PARAMETER_MUTATION or not (is_floating(node) or counts):
            raise ModelError(
                f"the model overwrites the {_WRITTEN[spec.kind]} {target!r} of {node.meta['val'].dtype}",
                "Buffers of floats may be overwritten, and integers that nothing reads",
                "Overwrite it in the training loop, behind optimizer.step()"
                if spec.kind is OutputKind.PARAMETER_MUTATION
                else "Keep it as a buffer of floats, or pass it in and return it",
            )


def is_floating(node: torch.fx.Node) -> bool:
    """True if all that a node gives is tensors of floats."""
    return all(tensor.is_floating_point() for tensor in tensors(node.meta.get("val")))


def tensors(value: Any) -> Iterator[torch.Tensor]:  # Any: what an ATen operator returns
    """The tensors in a value, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from tensors(element)


def argument_names(program: ExportedProgram) -> dict[str, str]:
    """Placeholders of inputs -> the module's own names of its arguments, which torch writes in small letters."""
    called = program.module_call_graph[0].signature
    placeholders = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    known = list((called.forward_arg_names if called is not None else None) or ())
    args, kwargs = program.call_spec.in_spec.children() if program.call_spec.in_spec is not None else (None, None)
    found = {name: name for name in placeholders}
    if args is None or kwargs is None or len(known) < args.num_children:
        return found
    names = [*known[: args.num_children], *map(str, kwargs.context)]
    left = list(placeholders)
    for name, each in zip(names, (*args.children(), *kwargs.children()), strict=True):
        of_it, left = left[: each.num_leaves], left[each.num_leaves :]
        if each.is_leaf() and of_it[0].rstrip("_0123456789") == name.lower().rstrip("_0123456789"):
            found |= {of_it[0]: name} if name not in found else {}
    return found


@contextmanager
def unlogged() -> Iterator[None]:
    """While this lasts, torch does not log that an operator fails on tensors without values, which is told as well."""
    before = {(log := logging.getLogger(module.__name__)): log.disabled for module in (fake_tensor, symbolic_shapes)}
    for log in before:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in before.items():
            log.disabled = disabled


_OTHERS = ("/site-packages/torch/", f"{PurePath(__file__).parents[2]}/")
"""Whose lines are not the model's, though they are in files."""
_GENERATED = ('File "<eval_with_key>', 'File "<frozen', 'File "<string>')
"""What others generated has no file, nor has what somebody typed (``<stdin>``)."""


def where_of(node: torch.fx.Node) -> str:
    """`file.py:line` of the model's source that made a node, else the module that it is of, or the node's own name."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return node.name
    written = [frame for frame in frames if not frame.startswith('File "<')]
    in_files = [frame for frame in written if not any(other in frame for other in _OTHERS)]
    typed = [frame for frame in frames if frame.startswith('File "<') and not frame.startswith(_GENERATED)]
    modules = [str(name) for name, _ in node.meta.get("nn_module_stack", {}).values() if name]
    if modules and not (written or typed):  # below torch.no_grad()
        return modules[-1]
    path, line = (in_files or typed or written or frames)[-1].removeprefix("File ").split(", line ", 1)
    return f"{PurePath(path.strip(chr(34))).name}:{line.split(',')[0]}"
