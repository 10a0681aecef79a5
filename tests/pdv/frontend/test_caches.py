"""Modules that keep tables from call to call: in caches of functions, in dicts, and in buffers of growing size."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ir.errors import ModelError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.torch.tracing.leftovers import _Kept

X = torch.arange(64.0).reshape(4, 2, 8).sin()
KEPT: dict[tuple[int, int], Tensor] = {}


def table(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) / 100


@functools.cache
def cached(rows: int, columns: int) -> Tensor:
    return table(rows, columns)


@functools.lru_cache(maxsize=4)
def bounded(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return table(rows, columns), table(rows, columns)


def of_file(rows: int, columns: int) -> Tensor:
    if (rows, columns) not in KEPT:
        KEPT[rows, columns] = table(rows, columns)
    return KEPT[rows, columns]


class Placed(nn.Module):
    """A layer over its input and a table of places; what it drops has pdv run it in evaluation, too."""

    def __init__(self, places: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(F.dropout(x, 0.5, self.training) + self.places(x.shape[1], x.shape[2]))
        return out


class Growing(nn.Module):
    """A table that is made anew where it is too small."""

    places: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("places", table(rows, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[0] < x.shape[1]:
            self.places = table(x.shape[1], 8)
        out: Tensor = self.layer(x + self.places[: x.shape[1]])
        return out


class Remembering(nn.Module):
    """State that each call makes longer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean((0, 1))[None]])
        out: Tensor = self.layer(x) + self.seen.mean(0)
        return out


def read(module: nn.Module) -> str:
    source = copy_of(module, X, train=True)
    return check_reading(load_program(module, X).graph, source, train=True)


@pytest.mark.parametrize(
    "places", [cached, lambda rows, columns: bounded(rows, columns)[0], of_file], ids=["cache", "lru_cache", "dict"]
)
def test_no_cache_keeps_tensors_without_values(places: Callable[[int, int], Tensor]) -> None:
    module = Placed(places)
    for function in (cached, bounded):
        function.cache_clear()
    KEPT.clear()
    assert read(module).endswith("are the same")
    assert type(places(2, 8)) is Tensor
    assert type(module(X)) is Tensor


def test_caches_of_local_code_keep_none_either() -> None:
    """Of no file: a class defined in a function, by what it and its functions have of there."""
    own, kept = functools.cache(table), dict[int, Tensor]()

    class Local(Placed):
        def forward(self, x: Tensor) -> Tensor:
            kept.setdefault(x.shape[1], table(x.shape[1], 1))
            return super().forward(x) + own(x.shape[1], x.shape[2]) + kept[x.shape[1]]

    module = Local(cached)
    assert read(module).endswith("are the same")
    assert type(own(2, 8)) is Tensor
    assert type(module(X)) is Tensor


def test_caches_of_files_that_come_later_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first trace: in a closure of a function, and in a class that has whatever else."""
    load_program(Placed(of_file), X)
    later = ModuleType("later")
    text = """
import functools, types
import torch
def kept(make):
    return lambda *sizes: make(*sizes)
@kept
@functools.cache
def closed(rows, columns):
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
class Tables:
    kind, number = types.FunctionType, 1
    own = staticmethod(functools.cache(lambda rows, columns: torch.ones(rows, columns)))
"""
    exec(compile(text, "later.py", "exec"), vars(later))
    monkeypatch.setitem(sys.modules, "later", later)
    for places in (later.closed, later.Tables.own):
        module = Placed(places)
        assert read(module).endswith("are the same")
        assert type(places(2, 8)) is Tensor


def test_caches_are_found_where_objects_are_frozen() -> None:
    """As programs freeze them that start others, and these tests: Python's collector does not look there."""
    assert gc.get_freeze_count()
    assert any(kept is cached for kept in _Kept().of(nn.Linear(1, 1)))


def test_caches_with_values_stay() -> None:
    kept = of_file(2, 8)
    load_program(Placed(of_file), X)
    assert of_file(2, 8) is kept


@pytest.mark.parametrize("within", [False, True], ids=["itself", "within"])
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_buffers_may_be_made_anew(rows: int, within: bool) -> None:
    module: nn.Module = Growing(rows)
    assert read(nn.Sequential(module) if within else module).endswith("are the same")


@pytest.mark.parametrize("within", [False, True], ids=["itself", "within"])
def test_state_of_growing_size_is_refused(within: bool) -> None:
    module: nn.Module = Remembering()
    with pytest.raises(ModelError, match=r"buffer (0\.)?seen has .* behind a call, and had \[1, 8\] before"):
        read(nn.Sequential(module) if within else module)
