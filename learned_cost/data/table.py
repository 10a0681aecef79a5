"""Measurements by columns: what a folder of profiles holds, a million rows in arrays.

Text is kept as codes into a sorted vocabulary. What does not apply to a row is -1 in a column of text or integers and
NaN in a column of numbers. Which columns there are, and which a file must have, is said here; reading files is
``learned_cost.data.dataset``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.kernel import DIMS

Array = NDArray[Any]  # Any: integers, floats or booleans, by column
Kind = Literal["text", "int", "long", "float", "bool"]  # int is 32 bits, long 64
NOT_APPLICABLE = -1


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a file.

    Attributes:
        required: a file without it is refused.
        least: the smallest value that a row may have, where it has one; ``above`` says that the least is excluded.
    """

    name: str
    kind: Kind
    required: bool = False
    least: float | None = None
    above: bool = False


def _texts(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "text") for name in names)


LATENCY = Column("latency_us", "float", required=True, least=0.0, above=True)
_TAIL = (
    Column("std_us", "float", least=0.0), Column("n_dup", "int"), Column("suspect", "bool"), Column("split", "text"),
    Column("fold", "int"),
)  # fmt: skip

# Columns that a profile of ours adds to those of public data; all optional (docs/profiles.md).
PROFILE_COLUMNS = _texts(
    "kind", "direction", "stack", "l2", "layout", "driver", "versions", "host", "date", "run", "plan"
)

KERNEL_COLUMNS: tuple[Column, ...] = (
    Column("source", "text"), Column("gpu", "text", required=True), Column("op", "text", required=True),
    Column("dtype", "text", required=True),
    *_texts("kv_dtype", "backend", "backend_version", "kernel", "distribution", "model"),
    *(Column(name, "int", least=0.0) for name in DIMS),
    Column("dims_json", "text"), Column("n_ctas", "long"), Column("cta_threads", "int"),
    *(Column(name, "float", least=0.0) for name in ("flops", "bytes", "roofline_us")),
    LATENCY, *_TAIL, *PROFILE_COLUMNS, Column("threads", "int"), Column("repeats", "int"),
)  # fmt: skip

COLLECTIVE_COLUMNS: tuple[Column, ...] = (
    *_texts("source"), Column("gpu", "text", required=True), *_texts("system", "interconnect"),
    Column("collective", "text", required=True), *_texts("algo_lib", "lib_version", "dtype"),
    Column("n_devices", "int", required=True, least=1.0),
    *(Column(name, "int", least=1.0) for name in ("devices_per_node", "n_nodes", "cores")),
    Column("bytes", "long", required=True, least=0.0), LATENCY,
    *(Column(name, "float", least=0.0) for name in ("min_us", "max_us", "busbw_gbs")), *_TAIL, *PROFILE_COLUMNS,
    Column("threads", "int"), Column("repeats", "int"),
)  # fmt: skip

GRAPH_COLUMNS: tuple[Column, ...] = (
    Column("graph", "text", required=True), Column("node", "int", required=True), Column("op", "text", required=True),
    *_texts("Name", "target", "inputs", "input_shapes", "output_shape", "dtype"),
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Equally long columns.

    Attributes:
        columns: arrays by name; of text columns, codes (int32) into ``vocab``.
        vocab: the texts of each text column, sorted.
    """

    columns: Mapping[str, Array]
    vocab: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Array:
        """The array of a column (codes, if it is text)."""
        return self.columns[name]

    def text(self, name: str) -> NDArray[np.object_]:
        """A text column spelled out; None where it does not apply."""
        spelled = np.array([*self.vocab[name], None], dtype=object)
        result: NDArray[np.object_] = spelled[self.columns[name]]  # code -1 takes the last entry
        return result

    def at(self, name: str, row: int) -> str | None:
        """One cell of a text column."""
        code = int(self.columns[name][row])
        return None if code < 0 else self.vocab[name][code]

    def is_text(self, name: str, value: str) -> NDArray[np.bool_]:
        """Which rows have this text in the column."""
        if value not in self.vocab[name]:
            return np.zeros(len(self), dtype=bool)
        same: NDArray[np.bool_] = self.columns[name] == self.vocab[name].index(value)
        return same

    def take(self, rows: Array | slice) -> Table:
        """Rows by index, mask or slice. Vocabularies stay as they are."""
        return Table({name: column[rows] for name, column in self.columns.items()}, self.vocab)

    def only(self, names: Collection[str]) -> Table:
        """The columns of these names that there are."""
        return Table(
            {name: column for name, column in self.columns.items() if name in names},
            {name: texts for name, texts in self.vocab.items() if name in names},
        )

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Rows to learn from and to be scored on: not suspect, nor of caches emptied before each run (``l2``), which no
        kernel of a running program meets.
        """
        good: NDArray[np.bool_] = ~self.columns["suspect"]
        return good & ~self.is_text("l2", "cold") if "l2" in self.columns else good

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Measured seconds."""
        return np.asarray(self.columns["latency_us"], dtype=np.float64) * 1e-6


def concat(tables: Sequence[Table]) -> Table:
    """Tables of the same columns, one below the other; vocabularies are joined."""
    first = tables[0]
    if len(tables) == 1:
        return first
    columns: dict[str, Array] = {}
    vocab: dict[str, tuple[str, ...]] = {}
    for name in first.columns:
        if name not in first.vocab:
            columns[name] = np.concatenate([table.columns[name] for table in tables])
            continue
        joined = sorted({text for table in tables for text in table.vocab[name]})
        vocab[name] = tuple(joined)
        place = {text: code for code, text in enumerate(joined)}
        parts = []
        for table in tables:
            renamed = np.array([*(place[text] for text in table.vocab[name]), NOT_APPLICABLE], dtype=np.int32)
            parts.append(renamed[table.columns[name]])
        columns[name] = np.concatenate(parts)
    return Table(columns, vocab)


def not_applicable(kind: Kind, rows: int) -> Array:
    """A column that a file does not have."""
    if kind == "float":
        return np.full(rows, np.nan)
    if kind == "bool":
        return np.zeros(rows, dtype=bool)
    return np.full(rows, NOT_APPLICABLE, dtype=np.int64 if kind == "long" else np.int32)
