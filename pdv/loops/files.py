"""Folders of ``torch.distributed.checkpoint``: any box of a tensor read alone, boxes written by the rank that has them.

Nothing that a file says is run: its table is unpickled into torch's own records of shapes and places, and nothing
else, tensors and small values by torch's weights-only reader. Entry points: ``Folder``, ``Boxes``, ``write``.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from ir.errors import UsageError, WeightsError, WriteError, first_line
from pdv.loops.pieces import Box, is_first, share

TABLE = ".metadata"
WHOLE = "Whole files, as torch.distributed.checkpoint wrote them"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}  # fmt: skip


Part = Tensor | Callable[[], Tensor]


class _Table(pickle.Unpickler):
    """A table of shapes and places, and nothing that could be run."""

    def find_class(self, module: str, name: str) -> Any:  # Any: as the class it overrides
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


@dataclass
class _Target:
    """Where ``read_data`` puts what it reads."""

    tensor: Tensor
    value: Any = None  # Any: a small value that is no tensor

    def resolve_tensor(self, item: Any) -> Tensor:
        x = self.tensor
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            x = x.narrow(dim, start, length)
        return x

    def commit_tensor(self, item: Any, tensor: Tensor) -> None:
        """All is done."""

    def load_bytes(self, _: Any, value: io.BytesIO) -> None:
        self.value = torch.load(value, weights_only=True)


class Folder:
    """A checkpoint; ``tensors`` are the shapes of its tensors by name, ``values`` the names of what else it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        table = path / TABLE
        if not table.is_file():
            raise WeightsError(
                f"{path} has no {TABLE}", "A folder that torch.distributed.checkpoint wrote", "Check the path"
            )
        try:
            with table.open("rb") as file:
                self._table: Any = _Table(file).load()
            entries: Mapping[str, Any] = self._table.state_dict_metadata
            places = [PurePath(info.relative_path) for info in self._table.storage_data.values()]
        except Exception as error:  # whatever bytes do to an unpickler
            raise WeightsError(
                f"{table} is no table of a checkpoint ({first_line(error)})",
                "Shapes and places of tensors alone",
                "Save it again",
            ) from error
        if bad := [place for place in places if place.is_absolute() or ".." in place.parts]:
            raise WeightsError(f"{table} names {bad[0]}", "Files of its own folder", "Save it again")
        self.tensors = {
            name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, kinds.TensorStorageMetadata)
        }
        self.values = [name for name in entries if name not in self.tensors]

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        found: torch.dtype = self._table.state_dict_metadata[name].properties.dtype
        return found

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box of it, from the files that have parts of that."""
        entry = self._table.state_dict_metadata[name]
        box = tuple((0, size) for size in entry.size) if box is None else box
        chunk = kinds.ChunkStorageMetadata(
            offsets=torch.Size([start for start, _ in box]), sizes=torch.Size([stop - start for start, stop in box])
        )
        target = _Target(torch.empty(chunk.sizes, dtype=entry.properties.dtype))
        self._read(name, LoadPlan(create_read_items_for_chunk_list(name, entry, [chunk])), target)
        return target.tensor

    def value(self, name: str) -> Any:  # Any: what a loop saved beside tensors
        """What is no tensor; numbers, text, lists and dicts of these."""
        from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

        none, index = torch.Size((0,)), kinds.MetadataIndex(name)
        item = ReadItem(
            type=LoadItemType.BYTE_IO, dest_index=index, dest_offsets=none, storage_index=index, storage_offsets=none,
            lengths=none,
        )  # fmt: skip
        target = _Target(torch.empty(0))
        self._read(name, LoadPlan([item]), target)
        return target.value

    def _read(self, name: str, plan: LoadPlan, target: Any) -> None:
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self._table, is_coordinator=False)
        try:
            reader.read_data(plan, target)
        except (
            OSError,
            EOFError,
            RuntimeError,
            KeyError,
            ValueError,
            pickle.UnpicklingError,
            zipfile.BadZipFile,
        ) as error:
            raise WeightsError(
                f"{name} of {self.path} cannot be read ({first_line(error)})",
                WHOLE,
                "Take another checkpoint",
            ) from error


class Boxes:
    """The boxes of a tensor that this rank holds, as ``torch.distributed.checkpoint`` asks for them.

    parts: what is written, by box; called for it where it is a function, when its turn has come.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, parts: Mapping[Box, Part]) -> None:
        self.shape, self.dtype = shape, dtype
        self.parts = {tuple(start for start, _ in box): part for box, part in parts.items()}
        self.sizes = {
            tuple(start for start, _ in box): torch.Size([stop - start for start, stop in box]) for box in parts
        }

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = kinds.TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=kinds.MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=kinds.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=size),
                    properties=properties,
                    size=torch.Size(self.shape),
                ),
            )
            for offsets, size in self.sizes.items()
        ]

    def part(self, offsets: torch.Size | None) -> Tensor:
        """The box that begins there, to be written."""
        part = self.parts[tuple(offsets or ())]
        return (part() if callable(part) else part).detach().contiguous()


class _Planner(DefaultSavePlanner):
    """Torch's own, which finds boxes."""

    def lookup_object(self, index: kinds.MetadataIndex) -> Any:  # Any: as the method it overrides
        found = self.state_dict[index.fqn]
        return found.part(index.offset) if isinstance(found, Boxes) else super().lookup_object(index)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Whether a checkpoint may be written here: only another one is replaced.

    Raises:
        UsageError: saying what stands there, on all ranks.
    """
    there = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    ours = path.is_dir() and (path / TABLE).is_file()
    if share(there and not (overwrite and ours))[0]:
        mend = "Choose another folder" if not ours or overwrite else "Choose another folder, or pass overwrite=True"
        raise UsageError(f"{path} is there already", "A new folder, or a checkpoint to overwrite", mend)


def write(path: Path, state: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Write a checkpoint beside its place, and move it there; all ranks must call it.

    Raises:
        UsageError: as ``check_free``. WriteError: on all ranks, if one could not write its part. WeightsError: the
            same, if what was to be written could not be read.
    """
    check_free(path, overwrite=overwrite)
    part = path.with_name(f".{path.name}.part")
    error = source = ""
    if is_first():
        shutil.rmtree(part, ignore_errors=True)
    share(None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant, on one process
            alone = not dist.is_initialized()
            save(dict(state), storage_writer=FileSystemWriter(part), planner=_Planner(), no_dist=alone)
        if is_first():
            _move(part, path)
    except (OSError, CheckpointException) as failure:
        error = str(failure).strip().splitlines()[-1]
        source = _unread(failure)
    if unread := [text for text in share(source) if text]:
        shutil.rmtree(part, ignore_errors=True)
        raise WeightsError(unread[0], WHOLE, "Take another checkpoint")
    if failed := [text for text in share(error) if text]:
        shutil.rmtree(part, ignore_errors=True)
        raise WriteError(f"{path} cannot be written ({failed[0]})", "A disk with room", "Free some room")


def _unread(failure: OSError | CheckpointException) -> str:
    """What could not be read of what was to be written; nothing if that was not it."""
    found = [error for error, _ in failure.failures.values()] if isinstance(failure, CheckpointException) else []
    return next((error.what for error in found if isinstance(error, WeightsError)), "")


def _move(part: Path, path: Path) -> None:
    """Put a whole checkpoint where it belongs; what was there stays until then."""
    aside = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        path.rename(aside)
    part.rename(path)
    shutil.rmtree(aside, ignore_errors=True)
