"""Weights under the names of the source model: safetensors files written and read one tensor at a time, on all ranks.

Files are laid out as Hugging Face does it: ``model.safetensors``, or several with ``model.safetensors.index.json``.
Entry points: ``save``, ``load``, ``full_state``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .calls import compare_weights
from .kernels.meetings import meet
from .parallel import combine
from .stored import Files, Held, SourceNames, Stored, take_view

if TYPE_CHECKING:
    from .runtime import ParallelModule

INDEX = "model.safetensors.index.json"
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
Entry = tuple[torch.dtype, tuple[int, ...]]
Read = Callable[[Tensor], Tensor | None]


def full_state(model: ParallelModule) -> dict[str, Tensor]:
    """As ``ParallelModule.full_state_dict``: tensors that share memory in the source share it here."""
    _meet_with_all(model, "full_state_dict")
    found = _under_all_names(model, model.whole(lambda tensor: tensor.detach(), rest=True))
    if model.mesh.origins:
        file = model.mesh.origins[0][1].file
        found |= {name: file.get_tensor(name) for name in SourceNames.of(file).unread}
    return found


def full_gradients(model: ParallelModule) -> dict[str, Tensor]:
    """As ``ParallelModule.full_gradients``: those of one tensor share memory under all its names."""
    meet(model, "full_gradients")
    return _under_all_names(model, model.whole(lambda tensor: tensor.grad, rest=False))


def _under_all_names(model: ParallelModule, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under stored names, in the source's."""
    if not model.mesh.origins:
        return found
    said = SourceNames.of(model.mesh.origins[0][1].file)
    views = {name: take_view(found[stored], view) for name, (stored, view) in said.names.items() if stored in found}
    return {name: tensor for name, tensor in {**found, **views}.items() if name not in said.joint}


def _meet_with_all(model: ParallelModule, what: str) -> None:
    """Wait for all ranks, before weights are handed out: all that there are, and on all ranks the same."""
    meet(model, what)
    _check_kept(model)
    compare_weights(model, go_on=True)


def _check_kept(model: ParallelModule) -> None:
    """Whether all weights of the source are here, or can be told from what is.

    Raises:
        ValueError: if not, as in a package for inference that holds what was computed of them.
    """
    computed = SourceNames.of(model.mesh.origins[0][1].file).computed if model.mesh.origins else ()
    if computed:
        raise ValueError(
            f"not-saved: {computed[0]} was computed of weights, which a package for inference does not keep. "
            "Save them from the model's training package, or keep the file that they were loaded from."
        )


# ---- Writing ----


@dataclass
class _Layout:
    """Where tensors lie in the files of a checkpoint: file, offset and type, by name."""

    headers: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    sizes: list[int] = field(default_factory=list)

    def add(self, name: str, entry: Entry, most: int) -> None:
        dtype, shape = entry
        size = math.prod(shape) * dtype.itemsize
        if not self.sizes or (self.sizes[-1] and self.sizes[-1] + size > most):
            self.headers.append({"__metadata__": {"format": "pt"}})
            self.sizes.append(0)
        start = self.sizes[-1]
        self.sizes[-1] = start + size
        self.headers[-1][name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (start, start + size)}

    def files(self) -> list[str]:
        count = len(self.sizes)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


class _Writer:
    """The files of a layout, beside their places until all are written; what goes wrong is kept in ``error``."""

    def __init__(self, folder: Path, layout: _Layout, *, overwrite: bool) -> None:
        self.folder, self.names, self.error = folder, layout.files(), ""
        self.files: list[BinaryIO] = []
        self.places: dict[str, tuple[int, int]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.stale = sorted(folder.glob("model*.safetensors*"))
            if self.stale and not overwrite:
                raise OSError(f"{self.stale[0]} is there already: choose another folder, or pass overwrite=True")
            for number, (name, header) in enumerate(zip(self.names, layout.headers, strict=True)):
                text = json.dumps(header, separators=(",", ":")).encode()
                text = text.ljust(-(-len(text) // 8) * 8)
                self.files.append(self._part(name).open("w+b"))
                self.files[-1].write(len(text).to_bytes(8, "little") + text)
                self.files[-1].truncate(8 + len(text) + layout.sizes[number])
                for tensor in header.keys() - {"__metadata__"}:
                    self.places[tensor] = number, 8 + len(text) + header[tensor]["data_offsets"][0]
            self.left = {*self.places}
            self.index = {
                "metadata": {"total_size": sum(layout.sizes)},
                "weight_map": {name: self.names[number] for name, (number, _) in sorted(self.places.items())},
            }
        except OSError as error:
            self.error = str(error)

    def _part(self, name: str) -> Path:
        return self.folder / f".{name}.part"

    def put(self, name: str, value: Tensor) -> None:
        """Write a tensor where it belongs."""
        if self.error or name not in self.places:
            return
        number, offset = self.places[name]
        self.left.discard(name)
        try:
            self.files[number].seek(offset)
            self.files[number].write(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            self.error = str(error)

    def finish(self) -> None:
        """Move all files to their places, the index last; or leave what was there."""
        try:
            for file in self.files:
                file.flush()
                os.fsync(file.fileno())
                file.close()
            if not self.error and self.left:
                self.error = f"{len(self.left)} tensors were not given ({min(self.left)})"
            if not self.error:
                if len(self.names) > 1:
                    self._part(INDEX).write_text(json.dumps(self.index, indent=2) + "\n", encoding="utf-8")
                for path in self.stale:
                    path.unlink()
                for name in [*self.names, *([INDEX] if len(self.names) > 1 else [])]:
                    self._part(name).replace(self.folder / name)
        except OSError as error:
            self.error = str(error)
        finally:
            for name in [*self.names, INDEX]:
                with suppress(OSError):
                    self._part(name).unlink()


@torch.no_grad()
def save(model: ParallelModule, folder: str | os.PathLike[str], most: int, *, overwrite: bool) -> None:
    """As ``ParallelModule.save_safetensors``."""
    _meet_with_all(model, "save_safetensors")
    origins = model.mesh.origins
    file = origins[0][1].file if origins else None
    tables = _gather({name: entry for tensor, stored in origins for name, entry in _entries(tensor, stored).items()})
    own = None if file is None else SourceNames.of(file)
    given = _gather(None if own is None else (own.names, own.unread, own.joint))  # classes go by other names elsewhere
    said = next((SourceNames(*parts) for parts in given if parts is not None), SourceNames())
    entries: dict[str, Entry] = {name: entry for table in reversed(tables) for name, entry in table.items()}
    views = {name: source for name, (source, _) in said.names.items() if source in entries}
    others = {name: _shape_of(entries[source], said.names[name][1]) for name, source in views.items()}
    unread = {name: file.get_tensor(name) for name in said.unread} if file is not None else {}
    layout = _Layout()
    state = {**entries, **others, **{name: (x.dtype, tuple(x.shape)) for name, x in unread.items()}}
    for name in sorted(state.keys() - set(said.joint)):
        layout.add(name, state[name], most)
    first = not dist.is_initialized() or dist.get_rank() == 0
    writer = _Writer(Path(folder), layout, overwrite=overwrite) if first else None
    for part in model.whole_parts(lambda tensor: tensor.detach(), rest=True):
        if writer is not None:
            for name, value in part.items():
                writer.put(name, value)
                for other in (other for other, source in views.items() if source == name):
                    writer.put(other, take_view(value, said.names[other][1]))
    if writer is not None:
        for name, value in unread.items():
            writer.put(name, value)
        writer.finish()
    error = _gather(writer.error if writer is not None else "")[0]
    if error:
        raise OSError(f"not-saved: {error}")


def _gather(value: Any) -> list[Any]:  # Any: what pickle takes
    """What each rank passes, on all ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _entries(tensor: Tensor, stored: Stored) -> dict[str, Entry]:
    """Type and shape of the stored tensors that a parameter or buffer is made of."""
    return {name: (tensor.dtype, tuple(stored.file.get_slice(name).get_shape())) for name in stored.names()}


def _shape_of(entry: Entry, view: Any) -> Entry:  # Any: JSON
    dtype, shape = entry
    return dtype, tuple(take_view(torch.empty(shape, device="meta"), view).shape)


# ---- Reading ----


@torch.no_grad()
def load(model: ParallelModule, given: str | os.PathLike[str] | Mapping[str, Tensor]) -> None:
    """As ``ParallelModule.load_safetensors``."""
    origins = model.mesh.origins
    if not origins:
        return
    said = SourceNames.of(origins[0][1].file)
    file: Any = Held(given, origins[0][1].file) if isinstance(given, Mapping) else Files(_files_of(Path(given)))
    own = set(given) if isinstance(given, Mapping) else set(file.keys())
    other = {source: name for name, (source, view) in said.names.items() if not view and name in own}
    wanted = {name: entry for tensor, stored in origins for name, entry in _entries(tensor, stored).items()}
    renamed = {name: name if name in own else other.get(name, "") for name in wanted}
    made = {name: _join(name, wanted[name], said, file) for name in wanted if name in said.joint}
    missing = [name for name, found in renamed.items() if not found and name not in made]
    if missing:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        computed = [name for name in missing if name in said.computed]
        again = "was computed of others: load_pretrained of pdv.loops.pretrained computes it again."
        mend = f" {computed[0]} {again}" if computed else ""
        raise ValueError(f"not-loaded: {len(missing)} of {len(wanted)} tensors are not there ({some}).{mend}")
    for name, (_, shape) in wanted.items():
        found = shape if name in made else tuple(file.get_slice(renamed[name]).get_shape())
        if found != shape:
            raise ValueError(f"not-loaded: {renamed[name]} is of shape {list(found)}, the model has {list(shape)}")
    source = Held(made, _Renamed(file, renamed))
    for tensor, stored in origins:
        piece, here = tensor, stored.of(source)
        if isinstance(tensor, DTensor):
            piece = tensor.to_local()
            for axis, placement in zip(model.mesh.axes, tensor.placements, strict=True):
                if isinstance(placement, Shard):
                    here = here.cut(placement.dim, axis)
        piece.copy_(here.view())


@dataclass(frozen=True)
class _Renamed:
    """A file whose tensors go by other names."""

    file: Any
    names: Mapping[str, str]

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.file.get_tensor(self.names[name])
        return found

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(self.names[name])


def _join(name: str, entry: Entry, said: SourceNames, file: Any) -> Tensor:
    """Memory that several tensors of the source lie in, from these."""
    dtype, shape = entry
    whole = torch.zeros(shape, dtype=dtype)
    for other, (source, view) in said.names.items():
        if source == name:
            take_view(whole, view).copy_(file.get_tensor(other))
    return whole


def _files_of(path: Path) -> Path:
    """The file to read: itself, or that of a folder."""
    if not path.is_dir():
        return path
    return path / INDEX if (path / INDEX).exists() else path / "model.safetensors"


# ---- Whole tensors ----


def whole_parts(model: ParallelModule, read: Read, *, rest: bool) -> Iterator[dict[str, Tensor]]:
    """As ``ParallelModule.whole_parts``, of what this rank's stage holds."""
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for members in _together(model.mesh.origins):
        found: dict[str, Tensor] = {}
        for tensor, stored in members:
            if id(tensor) not in held:
                raise RuntimeError(
                    f"replaced-tensor: {stored.name} is no longer what build made of it. "
                    "Parameters and buffers must be changed in place. Give build the device and the dtype."
                )
            value = read(tensor)
            if value is not None:
                with torch.no_grad():
                    stored.write(_combine(model, value), found, rest=rest)
        if found:
            yield found


def _combine(model: ParallelModule, x: Tensor) -> Tensor:
    """All of a parameter, on the device: as ``full_tensor``, by this file's own collectives."""
    if not isinstance(x, DTensor):
        return x.to(model.mesh.device)
    piece = x.to_local().to(model.mesh.device)
    for axis, placement in reversed(list(zip(model.mesh.axes, x.placements, strict=True))):  # inner axis first
        if isinstance(placement, Shard):
            piece = combine(piece, placement.dim, axis)
    return piece


def _together(origins: Sequence[tuple[Tensor, Stored]]) -> list[list[tuple[Tensor, Stored]]]:
    """Parameters and buffers in order, those of one stored tensor in one list."""
    groups: list[list[tuple[Tensor, Stored]]] = []
    of: dict[str, list[tuple[Tensor, Stored]]] = {}
    for tensor, stored in origins:
        near = [of[name] for name in stored.names() if name in of]
        group = near[0] if near else []
        if not near:
            groups.append(group)
        for other in near[1:]:
            if other is not group:
                group += other
                groups = [each for each in groups if each is not other]
        group.append((tensor, stored))
        of |= {name: group for _, part in group for name in part.names()}
    return groups
