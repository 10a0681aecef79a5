"""A package's text as one simulated rank imports it: everything is real but what reaches outside of the rank.

``torch.distributed`` is the simulated one, ``safetensors`` reads arrays in memory, ``os.environ`` says what torchrun
would. All floating types are float64, so that what differs in a result is not rounding.
Entry point: ``Texts.imported``.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ir.errors import VerificationError
from pdv.check.collectives import DeviceMesh, Distributed
from pdv.check.placed import DTensor, Placement, Replicate, Shard
from pdv.check.ranks import World
from pdv.emit.package import WEIGHTS

Arrays = Mapping[str, np.ndarray[Any, Any] | torch.Tensor]  # Any: floats, integers and booleans
_EIGHTHS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATS = ("float32", "float16", "bfloat16", "half", "float", "double", *_EIGHTHS)
_CASTS = re.compile(r"\.(float|half|bfloat16)\(\)")
_numbers = count()


@dataclass(frozen=True)
class Texts:
    """The modules of a package by file name, and the directory that messages name.

    ``own_types``: floats are of the types that the text says, in place of float64.
    """

    files: Mapping[str, str]
    directory: Path = Path("emitted")
    own_types: bool = False

    @cached_property
    def _compiled(self) -> dict[str, types.CodeType]:
        """Module name -> code; the package itself is ``__init__``."""
        found: dict[str, types.CodeType] = {}
        for name, text in self.files.items():
            try:
                found[Path(name).stem] = _compile(text, self.directory / name, self.own_types)
            except (SyntaxError, ValueError) as error:
                raise VerificationError(f"{self.directory / name} is no Python: {error}") from error
        return found

    @contextmanager
    def import_model(self, world: World[Any], rank: int, arrays: Arrays) -> Iterator[types.ModuleType]:
        """``model.py`` as this rank imports it."""
        outside = _outside(world, rank, arrays, own_types=self.own_types)
        loader = _Rank(f"_pdv_rank_{next(_numbers)}", self._compiled, outside)
        try:
            yield loader.module("model")
        finally:
            loader.forget()


@lru_cache(maxsize=256)  # most files of a package are those of all others
def _compile(text: str, file: Path, own_types: bool) -> types.CodeType:  # of a cache
    return compile(text if own_types else _CASTS.sub(".double()", text), str(file), "exec")


class _Rank:
    """The modules of one rank, each run once."""

    def __init__(self, package: str, compiled: Mapping[str, types.CodeType], outside: Mapping[str, Any]) -> None:
        self._package = package
        self._compiled = compiled
        self._modules: dict[str, types.ModuleType] = {}
        self._outside = outside
        self._builtins = {**vars(builtins), "__import__": self._import}

    def module(self, name: str) -> types.ModuleType:
        """One module of the package."""
        if name not in self._modules:
            if name not in self._compiled:
                raise ImportError(f"the package has no {name}.py")
            module = types.ModuleType(f"{self._package}.{name}")
            code = self._compiled[name]
            module.__file__, module.__package__ = code.co_filename, self._package
            module.__dict__["__builtins__"] = self._builtins
            self._modules[name] = module
            sys.modules[module.__name__] = module  # where dataclasses look for the names in annotations
            exec(code, module.__dict__)  # noqa: S102  # running the text is what this is for
        return self._modules[name]

    def forget(self) -> None:
        """Take the modules out of Python's table."""
        for module in self._modules.values():
            sys.modules.pop(module.__name__, None)

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0  # noqa: A002  # as builtins.__import__
    ) -> Any:  # fmt: skip
        if level:
            if name:
                return self.module(name)
            siblings = types.SimpleNamespace()
            for wanted in fromlist or ():
                setattr(siblings, wanted, self.module(wanted))
            return siblings
        if name in self._outside:
            return self._outside[name] if fromlist or "." not in name else self._outside[name.partition(".")[0]]
        if name.startswith("torch.distributed"):
            raise ImportError(f"simulated ranks have no {name}")
        return builtins.__import__(name, globals, locals, fromlist, level)


def _outside(world: World[Any], rank: int, arrays: Arrays, *, own_types: bool) -> dict[str, Any]:
    """Modules that a simulated rank sees in place of the real ones."""
    dist = Distributed(world, rank)
    environ = {**os.environ, "WORLD_SIZE": str(world.size), "RANK": str(rank), "LOCAL_RANK": str(rank)}

    def safe_open(path: Any, framework: str = "pt", device: str = "cpu") -> Stored:
        if Path(path).name != WEIGHTS:
            raise FileNotFoundError(f"the package has no {Path(path).name}")
        return Stored(arrays)

    def init_device_mesh(kind: str, sizes: Any, *, mesh_dim_names: Any) -> DeviceMesh:
        mesh = DeviceMesh(rank, sizes, mesh_dim_names)
        if mesh.size() != world.size:
            raise ValueError(f"a device mesh of {mesh.size()} ranks, but there are {world.size}")
        return mesh

    device_mesh = types.SimpleNamespace(DeviceMesh=DeviceMesh, init_device_mesh=init_device_mesh)
    tensor = types.SimpleNamespace(DTensor=DTensor, Placement=Placement, Replicate=Replicate, Shard=Shard)
    doubled = types.ModuleType("torch")
    doubled.__dict__.update(vars(torch))
    doubled.__dict__.update({} if own_types else dict.fromkeys(FLOATS, torch.float64), distributed=dist)
    doubled.__dict__["__getattr__"] = lambda name: getattr(torch, name)
    hooks = {f"register_optimizer_step_{when}_hook": lambda hook: None for when in ("pre", "post")}
    system = types.ModuleType("os")
    system.__dict__.update({**vars(os), "environ": environ})
    return {
        "torch": doubled,
        "torch.distributed": dist,
        "torch.distributed.device_mesh": device_mesh,
        "torch.distributed.tensor": tensor,
        "torch.optim.optimizer": types.SimpleNamespace(**hooks),  # those of torch would outlive the rank
        "safetensors": types.SimpleNamespace(safe_open=safe_open, SafetensorError=ValueError),
        "os": system,
    }


class Stored:
    """Arrays in memory, read as an open safetensors file is."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def keys(self) -> list[str]:
        """Names of all stored tensors."""
        return sorted(self._arrays)

    def metadata(self) -> dict[str, str]:
        """Nothing: tensors go by the names under which they are stored."""
        return {}

    def get_tensor(self, name: str) -> torch.Tensor:
        """One stored tensor."""
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> StoredSlice:
        """The same, to be read in part."""
        if name not in self._arrays:
            raise KeyError(f"there is no stored tensor {name}")
        value = self._arrays[name]
        return StoredSlice(value if isinstance(value, torch.Tensor) else torch.tensor(value))


class StoredSlice:
    """A stored tensor of which parts are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._tensor.shape)

    def __getitem__(self, ranges: Any) -> torch.Tensor:
        piece = self._tensor[ranges]
        return piece if piece.is_meta else piece.clone()
