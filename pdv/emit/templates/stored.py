"""Weights: read lazily, through views, and only the slice that this rank holds. Entry points: ``Weights``, ``join``.

And what is said of pieces in memory: ``local_piece``, ``placed_as``, ``counted_lists``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .parallel import Axis


@dataclass(frozen=True)
class Held:
    """Whole tensors in memory, read as an open safetensors file is; others are read from ``file``."""

    tensors: Mapping[str, Tensor]
    file: Any  # an open safetensors file

    def get_tensor(self, name: str) -> Tensor:
        """All of one."""
        found: Tensor = self.tensors[name] if name in self.tensors else self.file.get_tensor(name)
        return found

    def get_slice(self, name: str) -> Any:  # Any: what can be sliced, with a get_shape
        """One of which parts are read."""
        return HeldSlice(self.tensors[name]) if name in self.tensors else self.file.get_slice(name)

    def keys(self) -> list[str]:
        """Names of all that the file has."""
        return [*self.file.keys()]

    def metadata(self) -> Mapping[str, str]:
        """What the file says beside its tensors."""
        return self.file.metadata() or {}


@dataclass(frozen=True)
class HeldSlice:
    """A tensor in memory of which parts are read."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self.tensor.shape)

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        return self.tensor[ranges]


class Files:
    """A safetensors file, or those that an index names, read as one.

    A file is opened for as long as one tensor of it is read: what is mapped of it counts as memory of the process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.name.endswith(".json"):
            self._said: Mapping[str, str]
            self._said, self._paths = _read_index(path)
        else:
            file = _open(path)
            self._said = file.metadata() or {}
            self._paths = dict.fromkeys(file.keys(), path)
        self._held = {path: _open(path) for path in sorted({*self._paths.values()})}  # should they be removed

    def keys(self) -> list[str]:
        """Names of its tensors."""
        return list(self._paths)

    def get_tensor(self, name: str) -> Tensor:
        """All of one."""
        found: Tensor = self._file_of(name).get_tensor(name)
        return found

    def get_slice(self, name: str) -> Any:  # Any: what can be sliced, with a get_shape
        """One of which parts are read."""
        return self._file_of(name).get_slice(name)

    def metadata(self) -> Mapping[str, str]:
        """What the files say beside their tensors."""
        return self._said

    def __deepcopy__(self, memo: Any) -> Files:
        """Itself: nothing of it changes."""
        return self

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        """Saved with a model: where the files lie, to be opened there."""
        return Files, (self._path,)

    def _file_of(self, name: str) -> Any:  # Any: it ships no types
        if (path := self._paths.get(name)) is None:
            raise _unreadable(self._path, KeyError(f"it has no tensor {name}"))
        return _open(path) if path.exists() else self._held[path]


def _open(path: Path) -> Any:  # Any: it ships no types
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _read_index(path: Path) -> tuple[Mapping[str, str], dict[str, Path]]:
    """What an index says beside tensors, and the file that each tensor is in."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return listed.get("metadata") or {}, {name: path.parent / file for name, file in listed["weight_map"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> RuntimeError:
    """Of a file that is not there, or is not what it was."""
    found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
    return RuntimeError(
        f"bad-weights: {path.absolute()} ({found}) cannot be read: {type(error).__name__}: {error}. Allowed: a whole "
        "safetensors file, or the index of several. If a copy of it broke off, copy it again; of a package, write it "
        "once more by pdv optimize."
    )


@dataclass(frozen=True)
class SourceNames:
    """What the state of the source has besides the tensors that the program reads.

    names: another name -> the stored tensor of which it is a view, and the view.
    unread: tensors that are stored, and that no line of the program reads.
    joint: stored tensors that the source has only in views.
    computed: stored tensors that the source has not, and that were computed of its own.
    frozen: parameters of the source that were not trained when the program was planned.
    """

    names: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # Any: JSON
    unread: tuple[str, ...] = ()
    joint: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: Any) -> SourceNames:  # Any: an open safetensors file
        """What a file of weights says."""
        return cls.read((file.metadata() or {}).get("pdv", "{}"))

    @classmethod
    def read(cls, text: str) -> SourceNames:
        """The same of its text."""
        said = json.loads(text)
        lists = (tuple(said.get(name, ())) for name in ("unread", "joint", "computed", "frozen"))
        return cls(said.get("names", {}), *lists)


def take_view(x: Tensor, view: Any) -> Tensor:  # Any: JSON
    """A tensor as a view has it: (``slice``, dim, start, stop, …), (``permute``, dims) and (``reshape``, sizes)."""
    for name, *values in view:
        several = len(values) > 1  # dim, start, stop, and of how many
        x = x.narrow(values[0], values[1], values[2] - values[1]) if several else getattr(x, name)(values[0])
    return x


def _present(path: Path) -> Path:
    """A file of weights, or the index that is there in its place."""
    index = path.with_name(f"{path.name}.index.json")
    return index if index.exists() else path


class Weights:
    """A safetensors file; ``weights[name]`` names a stored tensor without reading it.

    dtype: what floating-point tensors are read as; default is as they are stored.
    """

    def __init__(self, path: str | Path | Held, dtype: torch.dtype | None = None) -> None:
        self.file: Held | Files = path if isinstance(path, Held) else Files(_present(Path(path)))
        self.dtype = dtype

    def __getitem__(self, name: str) -> Stored:
        dims = tuple((d, 0, n) for d, n in enumerate(self.file.get_slice(name).get_shape()))
        return Stored(self.file, name, dims, self.dtype)


@dataclass(frozen=True)
class Stored:
    """A view of a stored tensor: per dim of the view, (dim of the stored tensor, start, stop).

    What is reshaped or joined is a view of ``base``, whose dims in turn are those of the reshaped or joined tensor.
    """

    file: Any  # an open safetensors file
    name: str
    dims: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype | None = None
    base: Stored | Joined | None = None
    base_shape: tuple[int, ...] = ()

    def names(self) -> Iterator[str]:
        """The stored tensors that it is made of."""
        if self.base is None:
            yield self.name
        else:
            for part in self.base.parts if isinstance(self.base, Joined) else (self.base,):
                yield from part.names()

    def of(self, file: Any) -> Stored:  # Any: an open safetensors file
        """The same view of another file."""
        base = self.base
        if isinstance(base, Joined):
            return replace(self, file=file, base=replace(base, parts=tuple(part.of(file) for part in base.parts)))
        return replace(self, file=file, base=None if base is None else base.of(file))

    def permute(self, *perm: int) -> Stored:
        """As ``Tensor.permute``."""
        return replace(self, dims=tuple(self.dims[dim] for dim in perm))

    def reshape(self, *shape: int) -> Stored:
        """As ``Tensor.reshape``; what is cut from it is cut after reading the whole."""
        dims = tuple((dim, 0, size) for dim, size in enumerate(shape))
        return replace(self, dims=dims, base=self, base_shape=shape)

    def narrow(self, dim: int, start: int, length: int) -> Stored:
        """As ``Tensor.narrow``."""
        source, first, stop = self.dims[dim]
        assert 0 <= start <= stop - first - length, f"{self.name}: [{start}, +{length}) of {stop - first}"
        cut = (source, first + start, first + start + length)
        return replace(self, dims=(*self.dims[:dim], cut, *self.dims[dim + 1 :]))

    def cut(self, dim: int, axis: Axis) -> Stored:
        """The block along ``dim`` that this rank holds."""
        _, start, stop = self.dims[dim]
        block, rest = divmod(stop - start, axis.size)
        assert rest == 0, f"{self.name}: dim {dim} of size {stop - start} over axis {axis.name} of size {axis.size}"
        return self.narrow(dim, axis.rank * block, block)

    def read(self, device: torch.device) -> Tensor:
        """The values, row-major, in memory of their own."""
        view = self.view()
        dtype = self.dtype if self.dtype is not None and view.is_floating_point() else view.dtype
        return torch.empty(view.shape, dtype=dtype, device=device).copy_(view)

    def view(self) -> Tensor:
        """The values as they are stored."""
        ranges = self._ranges()
        if self.base is not None:
            piece = self.base.view().reshape(self.base_shape)[ranges]
        else:
            piece = self.file.get_slice(self.name)[ranges] if ranges else self.file.get_tensor(self.name)
        return piece.permute([source for source, _, _ in self.dims])

    def write(self, value: Tensor, wholes: dict[str, Tensor], *, rest: bool) -> None:
        """Put ``value``, all of this view, where it belongs in the stored tensors, by name.

        Of what is new, the ``rest`` is as it is stored, or else zero.
        """
        value = value.permute([[source for source, _, _ in self.dims].index(dim) for dim in range(len(self.dims))])
        if self.base is not None:
            self.base.write(value.reshape(self.base.shape), wholes, rest=rest)
            return
        if self.name not in wholes:
            whole = value.new_zeros(self.file.get_slice(self.name).get_shape())
            partial = rest and value.numel() < whole.numel()
            wholes[self.name] = whole.copy_(self.file.get_tensor(self.name)) if partial else whole
        wholes[self.name][self._ranges()].copy_(value)

    @property
    def shape(self) -> list[int]:
        """Of the view."""
        return [stop - start for _, start, stop in self.dims]

    @property
    def kept(self) -> str:
        """How a tensor of the source is kept: "whole", "turned" (its dims in another order), or in "parts"."""
        if self.base is not None or len(self._ranges()) != len(sizes := self.file.get_slice(self.name).get_shape()):
            return "parts"
        if any((part.start, part.stop) != (0, size) for part, size in zip(self._ranges(), sizes, strict=True)):
            return "parts"
        return "whole" if all(at == dim for at, (dim, _, _) in enumerate(self.dims)) else "turned"

    def _ranges(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for _, start, stop in sorted(self.dims))


@dataclass(frozen=True)
class Joined:
    """Views of stored tensors, one behind another along ``dim``."""

    parts: tuple[Stored, ...]
    dim: int

    @property
    def shape(self) -> list[int]:
        """Of all together."""
        shape = self.parts[0].shape
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return shape

    def view(self) -> Tensor:
        """The values as they are stored."""
        return torch.cat([part.view() for part in self.parts], self.dim)

    def write(self, value: Tensor, wholes: dict[str, Tensor], *, rest: bool) -> None:
        """As ``Stored.write``."""
        sizes = [part.shape[self.dim] for part in self.parts]
        for part, piece in zip(self.parts, torch.split(value, sizes, self.dim), strict=True):
            part.write(piece, wholes, rest=rest)


def join(dim: int, *parts: Stored) -> Stored:
    """Several stored tensors as one, as ``torch.cat``."""
    joined = Joined(parts, dim)
    dims = tuple((d, 0, size) for d, size in enumerate(joined.shape))
    names = " and ".join(part.name for part in parts)
    return Stored(parts[0].file, names, dims, parts[0].dtype, joined, tuple(joined.shape))


# ---- What is in the memory of a tensor ----


def local_piece(x: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def placed_as(parameter: DTensor, piece: Tensor, mesh: DeviceMesh | None) -> DTensor:
    """A tensor that is placed as a parameter is, and cut into as large pieces; as ``from_local``, ten times as fast."""
    spec = getattr(parameter, "_spec", None)
    if spec is None or piece.dtype != parameter.dtype:
        return DTensor.from_local(piece, mesh, parameter.placements, run_check=False)
    return DTensor(piece, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def counted_lists(handlers: dict[Any, Any]) -> dict[Any, Any]:  # Any: as optimizers.py says
    """Handlers of what changes lists of DTensors in place (``_foreach_mul_``), which autograd does not count either.

    Lists may have plain tensors, too, such as buffers, which torch refuses, as it does ``_foreach_copy_``.
    """

    def count(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        itself = handlers.pop(op)
        try:
            op(*_local_lists(args, itself_fails=op is torch.ops.aten._foreach_copy_.default), **kwargs)
        finally:
            handlers[op] = itself
        increment_version([x for x in args[0] if not x.is_inference()])

    names = [name.removeprefix("aten::").split(".") for name in torch._C._dispatch_get_all_op_names()]  # noqa: SLF001
    changing = [each for each in names if each[0].startswith("_foreach_") and each[0].endswith("_")]
    return {getattr(getattr(torch.ops.aten, name), (*of, "default")[0]): count for name, *of in changing}


def _local_lists(args: tuple[Any, ...], *, itself_fails: bool) -> tuple[Any, ...]:
    """Arguments of an operation on each place of lists; of mixed ones what this rank holds, if places are alike."""
    lists = [x for x in args if isinstance(x, list | tuple) and all(isinstance(each, Tensor) for each in x)]
    of = [[(x, getattr(x, "placements", ())) for x in place] for place in zip(*lists, strict=False)]
    places = [{(axes, axes and x.shape) for x, axes in place} for place in of]
    placed = [axes for place in places for axes, _ in place]
    is_alike = all(len(place) == 1 for place in places) and not any(x.is_partial() for axes in placed for x in axes)
    if not is_alike or not any(placed) or not (itself_fails or () in placed):
        return args
    return tuple([local_piece(each) for each in x] if any(x is one for one in lists) else x for x in args)


def cut_over(axes: Sequence[Axis], x: Tensor) -> tuple[Axis, ...]:
    """Those of a mesh's axes along which ranks hold different pieces."""
    placements = x.placements if isinstance(x, DTensor) else ()
    return tuple(a for a, placed in zip(axes, placements, strict=False) if isinstance(placed, Shard))
