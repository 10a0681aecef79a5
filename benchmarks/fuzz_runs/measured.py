"""Measurements, and weights of the cost model, that say what cannot be. Entry points: the ``_case``s."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzz_runs.case import Case, flipped
from benchmarks.fuzz_runs.onnx_files import TWO
from benchmarks.fuzz_runs.packages import changed_tensors
from benchmarks.fuzz_runs.settings import PLAN
from benchmarks.fuzz_runs.values import NUMBERS, TEXTS, altered
from benchmarks.record import ROOT

ROWS = 40  # of each file: what is wrong shows in few
FILES = ("kernels-0001.parquet", "collectives-0001.parquet")


@cache
def _table(name: str) -> pa.Table:
    whole = pq.ParquetFile(ROOT / "learned_cost/profiles/cpu-core" / name).read()
    return whole.take(list(range(0, whole.num_rows, max(whole.num_rows // ROWS, 1)))[:ROWS])


def _bytes(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def profile_case(rng: random.Random) -> Case:
    """A folder of measurements."""
    name = rng.choice(FILES)
    tables = {each: _bytes(_table(each)) for each in FILES}
    if rng.random() < 0.3:
        what, tables[name] = flipped(tables[name], rng)
    else:
        what, table = _changed(_table(name), rng)
        tables[name] = _bytes(table)
    if rng.random() < 0.1:
        del tables[rng.choice(FILES)]
    files = {f"p/{each}": data for each, data in tables.items()} | {"c.yaml": TWO}
    skip = ["--skip-bad"] if rng.random() < 0.3 else []
    command = rng.choice(
        [["cost", "evaluate", "--data", "../in/p", *skip], [*PLAN, "../in/c.yaml", "--cost", "../in/p"]]
    )
    return Case("profiles", f"{name}: {what}", files, command)


def _changed(table: pa.Table, rng: random.Random) -> tuple[str, pa.Table]:
    place = rng.randrange(table.num_columns)
    name = table.column_names[place]
    column = table.column(place)
    match rng.randrange(6):
        case 0:
            return f"{name} left out", table.drop_columns([name])
        case 1:
            return f"{name} renamed", table.rename_columns(
                [f"{each}s" if each == name else each for each in table.column_names]
            )
        case 2:
            return f"{name} twice", table.append_column(name, column)
        case 3:
            kind = rng.choice(
                [pa.string(), pa.int64(), pa.float32(), pa.bool_(), pa.list_(pa.int32()), pa.binary(), pa.null()]
            )
            return f"{name} of {kind}, empty", table.set_column(place, name, pa.nulls(table.num_rows, kind))
        case 4:
            return "no rows", table.slice(0, 0)
    values = column.to_pylist()
    said = rng.choice([*NUMBERS, *TEXTS, None])
    for row in rng.sample(range(len(values)), rng.choice([1, 5, len(values)])):
        values[row] = said
    try:
        return f"{name} says {said!r}"[:120], table.set_column(place, name, pa.array(values, column.type))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        kind = pa.float64() if isinstance(said, float) else pa.string()
        text = [None if value is None else str(value) for value in values]
        texts: Any = [float("nan")] * len(values) if kind == pa.float64() else pa.array(
            [None if t is None else t.encode("utf-8", "replace").decode() for t in text], kind)  # fmt: skip
        return f"{name} is {kind}", table.set_column(
            place, name, texts if kind == pa.string() else pa.array(texts, kind)
        )


def cost_weights_case(rng: random.Random) -> Case:
    """Weights of the cost model."""
    base = rng.choice(["kernels", "collectives", "collectives"])
    folder = ROOT / "learned_cost/weights"
    numbers, text = ((folder / f"{base}.{suffix}").read_bytes() for suffix in ("safetensors", "json"))
    match rng.randrange(4):
        case 0:
            what, text = flipped(text, rng)
        case 1:
            what, numbers = changed_tensors(numbers, rng)
        case 2:
            what, said = altered(json.loads(text), rng)
            text = json.dumps(said).encode("utf-8", "backslashreplace")
        case _:
            description = json.loads(text)
            key = rng.choice([key for key, value in description.items() if not isinstance(value, list)])
            what, said = altered({key: description[key]}, rng)
            text = json.dumps({**description, **said} if isinstance(said, dict) else said).encode(
                "utf-8", "backslashreplace"
            )
    files = {"w.safetensors": numbers, "w.json": text, "c.yaml": TWO}
    command = rng.choice([["cost", "show", "../in/w"], [*PLAN, "../in/c.yaml", "--cost", "../in/w.safetensors"]])
    return Case("cost weights", f"{base}: {what}"[:160], files, command)
