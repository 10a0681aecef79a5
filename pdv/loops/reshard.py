"""A checkpoint of one plan as one of another, or as one that every plan can read, on one process and without training.

A plan's own ``state_dict`` goes by the names of its parameters, in which a weight of the source may be cut into three
or lie transposed. Each tensor to be written is made, when its turn has come, from those that were saved, by way of the
source's tensors. Entry point: ``reshard``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ir.errors import UsageError, WeightsError
from pdv.loops import moments
from pdv.loops.checkpoint import AVERAGE, NOTE, WEIGHTS, Kind, as_note, read_note
from pdv.loops.files import Boxes, Folder, check_free, write
from pdv.loops.pieces import Piece, check_kept, pieces_of, shape_of
from pdv.plan.package import import_package, read_document

STATE, GROUPS = "state.", "param_groups."
Layout = Mapping[str, Piece]
"""The parameters and buffers of a plan by their names in its ``state_dict``."""


@dataclass
class Found:
    """What a checkpoint has, by the source's names.

    tensors, numbers: by a template of names, ``optim.state.{}.exp_avg``. others: what is of no parameter, by name.
    """

    tensors: dict[str, Any] = field(default_factory=dict)  # Any: as an open safetensors file gives tensors
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: numbers, or tensors of one
    others: dict[str, Any] = field(default_factory=dict)


def reshard(
    checkpoint: Path, output: Path, *, of: Path | None = None, to: Path | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Write ``output``, which the plan ``to`` loads with ``torch.distributed.checkpoint``, or without it every plan.

    of: the package whose ``state_dict`` was saved; it is not asked for where ``save_checkpoint`` wrote.

    Raises:
        UsageError: if a package is missing or none, or the place is taken. WeightsError: if the checkpoint cannot be
            read, is of another model or lacks something. WriteError: if there is no room.
    """
    check_free(output, overwrite=overwrite)
    file = Folder(checkpoint)
    own = NOTE in file.tensors
    if not own and of is None:
        raise UsageError(
            f"{checkpoint} has the names of one plan",
            "The package that it was saved from, with --from",
            "Say --from DIR",
        )
    found = _of_source(file) if own or of is None else _of_plan(file, layout_of(of))
    if to is None:
        state = _for_all(found, layout_of(of), file) if of is not None and not own else None
        if state is None:
            raise UsageError(f"{checkpoint} loads under every plan as it is", "A package for --to", "Say --to DIR")
    else:
        state = dict(_for_plan(found, layout_of(to), file))
    write(output, state, overwrite=overwrite)
    return {"tensors": len(state), "kinds": sorted({*found.tensors, *found.numbers}), "others": sorted(found.others)}


def layout_of(package: Path) -> dict[str, Piece]:
    """Where the parameters of a package lie in its source; on one process, weights are not read.

    Raises:
        UsageError: if the folder is no package, or one that does not keep the source's weights.
    """
    read_document(package)
    model = import_package(package.absolute()).build(device="meta")
    pieces = {id(piece.tensor): piece for piece in pieces_of(model)}
    check_kept([*pieces.values()])
    return {name: pieces[id(x)] for name, x in model.state_dict(keep_vars=True).items() if id(x) in pieces}


# ---- What was saved ----


def _of_source(file: Folder) -> Found:
    """Of a checkpoint by ``save_checkpoint``."""
    note, found = read_note(file), Found()
    templates = {WEIGHTS: "model.{}", AVERAGE: "average.{}"}
    templates |= {f"{moments.PREFIX}{key}.": f"optimizer.{STATE}{{}}.{key}" for key in moments.kept_in(file.tensors)}
    for prefix, template in templates.items():
        names = [name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)]
        if names:
            found.tensors[template] = _Known(Kind(file, prefix, {}), frozenset(names), _prefixed(file, prefix))
    said = note.get("optimizer", {"numbers": {}, "groups": [], "group_of": {}})
    for key, numbers in said["numbers"].items():
        template = f"optimizer.{STATE}{{}}.{key}"
        found.numbers[template] = {name: moments.decode(value) for name, value in numbers.items()}
    for name, number in said["group_of"].items():
        for key, value in said["groups"][number].items():
            found.numbers.setdefault(f"optimizer.{GROUPS}{{}}.{key}", {})[name] = moments.decode(value)
    found.others["loop"] = note["loop"]
    return found


def _prefixed(file: Folder, prefix: str) -> Callable[[str], torch.dtype]:
    return lambda name: file.dtype(f"{prefix}{name}")


@dataclass(frozen=True)
class _Known:
    """Tensors by the source's names, of which it is known which there are."""

    file: Any  # Any: as an open safetensors file
    names: frozenset[str]
    dtypes: Any  # Any: (name) -> torch.dtype

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.file.get_tensor(name)
        return found

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(name)


def _of_plan(file: Folder, layout: Layout) -> Found:
    """Of a checkpoint by the names of a plan's parameters, whatever stands before these."""
    found = Found()
    places: dict[str, dict[str, str]] = {}
    for name in (*file.tensors, *file.values):
        template, parameter = _parse(name, layout)
        if not template:
            found.others[name] = file.read(name) if name in file.tensors else file.value(name)
        elif name in file.tensors and file.tensors[name] == tuple(layout[parameter].tensor.shape):
            places.setdefault(template, {})[parameter] = name
        else:
            value = file.read(name) if name in file.tensors else file.value(name)
            if isinstance(value, Tensor) and value.numel() != 1:
                shape = list(layout[parameter].tensor.shape)
                raise WeightsError(f"{name} is of shape {list(value.shape)}, and {parameter} of {shape}", *_MENDS)
            _add_number(found.numbers.setdefault(template, {}), layout[parameter], value, name)
    if not places:
        raise WeightsError(f"{file.path} has no parameter of the package that --from names", *_MENDS)
    if foreign := [name for name in found.others if f".{STATE}0." in f".{name}" or name.endswith("param_groups")]:
        raise WeightsError(
            f"{foreign[0]} tells parameters by their numbers or in lists, which differ between ranks and plans",
            "The optimizer's state that get_optimizer_state_dict gives with flatten_optimizer_state_dict=True",
            "Save it so, or with save_checkpoint",
        )
    found.tensors = {template: _assemble(file, layout, names) for template, names in places.items()}
    return found


_MENDS = ("A checkpoint of that package", "Look at what --from names")


def _parse(name: str, layout: Layout) -> tuple[str, str]:
    """The template of a name and the parameter that it is of, or nothing.

    ``optim.state.blocks.0.up_weight.exp_avg`` is ``optim.state.{}.exp_avg`` and ``blocks.0.up_weight``.
    """
    words = name.split(".")
    for start in range(len(words)):
        head = "".join(f"{word}." for word in words[:start])
        if (rest := ".".join(words[start:])) in layout:
            return f"{head}{{}}", rest
        inner = ".".join(words[start:-1])
        if head.endswith((STATE, GROUPS)) and inner in layout:
            return f"{head}{{}}.{words[-1]}", inner
    return "", ""


def _add_number(numbers: dict[str, Any], piece: Piece, value: Any, name: str) -> None:
    for source in piece.names:
        if not _same(numbers.setdefault(source, value), value):
            raise WeightsError(
                f"{name} is {_text(value)}, and {_text(numbers[source])} of another part of {source}",
                "One number for all of a weight",
                "Save the weights alone",
            )


def _same(one: Any, other: Any) -> bool:  # Any: numbers, or tensors of one
    return _text(one) == _text(other)


def _text(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) else value)


def _assemble(file: Folder, layout: Layout, names: Mapping[str, str]) -> Any:
    """Tensors of the source, from parameters that were saved; those that are there in all parts."""
    parts: dict[str, list[tuple[str, Piece]]] = {}
    for parameter, piece in layout.items():
        for source in piece.names:
            parts.setdefault(source, []).append((parameter, piece))
    saved = {id(layout[parameter].tensor) for parameter in names}

    @lru_cache(maxsize=4)
    def read(source: str) -> Tensor:
        wholes: dict[str, Tensor] = {}
        done: set[int] = set()
        for parameter, piece in parts[source]:
            if parameter in names and id(piece.tensor) not in done:
                done.add(id(piece.tensor))
                piece.whole.write(file.read(names[parameter]), wholes, rest=True)
        return wholes[source]

    there = frozenset(name for name, of in parts.items() if all(id(piece.tensor) in saved for _, piece in of))

    def dtype(source: str) -> torch.dtype:
        return next(file.dtype(names[parameter]) for parameter, _ in parts[source] if parameter in names)

    return _Known(_Made(read, next(iter(layout.values()))), there, dtype)


@dataclass(frozen=True)
class _Made:
    """Tensors that a function gives."""

    read: Any  # Any: (name) -> Tensor
    like: Piece

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.read(name)
        return found

    def get_slice(self, name: str) -> Any:
        return _Slice(self, name)


@dataclass(frozen=True)
class _Slice:
    file: _Made
    name: str

    def get_shape(self) -> list[int]:
        return list(self.file.like.whole.file.get_slice(self.name).get_shape())

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        return self.file.get_tensor(self.name)[ranges]


# ---- What is written ----


def _for_plan(found: Found, layout: Layout, file: Folder) -> Iterator[tuple[str, Any]]:
    """By the names of a plan's parameters."""
    for template, source in found.tensors.items():
        for name, piece in layout.items():
            if _all_there(piece, source.names, template, file):
                shape = tuple(piece.tensor.shape)
                box = tuple((0, size) for size in shape)
                yield template.format(name), Boxes(shape, source.dtypes(piece.names[0]), {box: _maker(piece, source)})
    for template, numbers in found.numbers.items():
        for name, piece in layout.items():
            if _all_there(piece, numbers.keys(), template, file):
                whole: dict[str, Any] = {}
                for source in piece.names:
                    _add_number(whole, piece, numbers[source], f"{template.format(source)} in {file.path}")
                yield template.format(name), numbers[piece.names[0]]
    yield from found.others.items()


def _all_there(piece: Piece, names: Any, template: str, file: Folder) -> bool:  # Any: what `in` asks
    """Whether the checkpoint has what a parameter is made of.

    Raises:
        WeightsError: if only a part, or, of weights, nothing is there.
    """
    missing = [name for name in piece.names if name not in names]
    if missing and (len(missing) < len(piece.names) or template.endswith("{}")):
        raise WeightsError(f"{file.path} has not all of {template.format(missing[0])}", "All of a weight", _MENDS[1])
    return not missing


def _maker(piece: Piece, source: Any) -> Any:  # Any: () -> Tensor
    return lambda: piece.whole.of(source).view()


def _for_all(found: Found, layout: Layout, file: Folder) -> dict[str, Any]:
    """By the source's names, as ``save_checkpoint`` writes."""
    weights = [template for template in found.tensors if template.endswith("{}")]
    if len(weights) != 1:
        raise UsageError(
            f"{file.path} has {len(weights)} sets of weights ({', '.join(weights)})", "One", "Say --to DIR"
        )
    shapes = {name: shape_of(piece, name) for piece in layout.values() for name in piece.names}
    state: dict[str, Any] = {}
    for template, source in found.tensors.items():
        prefix = WEIGHTS if template.endswith("{}") else f"{moments.PREFIX}{template.rpartition('.')[2]}."
        for name in sorted(source.names):
            box = tuple((0, size) for size in shapes[name])
            state[f"{prefix}{name}"] = Boxes(shapes[name], source.dtypes(name), {box: _reader(source, name)})
    note: dict[str, Any] = {"version": 1, "loop": {}}
    if len(found.tensors) > 1 or found.numbers:
        note["optimizer"] = _optimizer_note(found.numbers)
    return {NOTE: as_note(note), **state}


def _reader(source: Any, name: str) -> Any:  # Any: () -> Tensor
    return lambda: source.get_tensor(name)


def _optimizer_note(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers and groups as ``save_checkpoint`` notes them: parameters of equal hyperparameters are one group."""
    steps: dict[str, Any] = {}
    of: dict[str, dict[str, Any]] = {}
    for template, values in numbers.items():
        key = template.rpartition(".")[2]
        for name, value in values.items():
            if f"{GROUPS}{{}}" in template:
                of.setdefault(name, {})[key] = moments.encode(value)
            else:
                steps.setdefault(key, {})[name] = moments.encode(value)
    groups: list[dict[str, Any]] = []
    for found in of.values():
        groups += [found] if found not in groups else []
    return {"numbers": steps, "groups": groups, "group_of": {name: groups.index(found) for name, found in of.items()}}
