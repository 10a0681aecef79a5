"""Devices as a folder of measurements lists them, gpus.csv: one row a device, in the units of data sheets.

Decides which column is which field of a record, and its unit. A name that a shipped record has keeps that record.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from ir.errors import DataError
from ir.files.reading import FileKind, read_text
from learned_cost.devices.device import DeviceRecord

# column -> field, factor to SI units, whole number
FIELDS: Mapping[str, tuple[str, float, bool]] = {
    "year": ("year", 1, True), "sm": ("sm_count", 1, True), "fp32_cores": ("fp32_cores", 1, True),
    "boost_mhz": ("boost_hz", 1e6, False), "mem_gb": ("memory_bytes", 2.0**30, True),
    "mem_bw_gbs": ("memory_bandwidth_bytes_per_s", 1e9, False), "l2_mb": ("l2_bytes", 2.0**20, True),
    "smem_kb_per_sm": ("shared_memory_bytes_per_sm", 2.0**10, True), "tdp_w": ("tdp_w", 1, False),
    "link_gbs_per_dir": ("link_bytes_per_s", 1e9, False),
    "pcie_gbs_per_dir": ("host_link_bytes_per_s", 1e9, False),
    "internode_gbs_per_gpu": ("internode_bytes_per_s", 1e9, False),
}  # fmt: skip
TEXTS = {"vendor": "vendor", "arch": "arch", "cc": "compute_capability", "link": "link", "spec_source": "source"}
RATES = {
    "fp32_tflops": "fp32",
    "fp32_matrix_tflops": "fp32_matrix",
    "fp16_tflops": "fp16",
    "bf16_tflops": "bf16",
    "fp8_tflops": "fp8",
    "fp4_tflops": "fp4",
    "int8_tops": "int8",
}
REQUIRED = ("gpu", "vendor", "arch", "sm", "fp32_tflops", "mem_gb", "mem_bw_gbs")
TABLE = FileKind(1 << 20, DataError, wanted="Give a table of devices")


def read_device_table(path: Path) -> dict[str, DeviceRecord]:
    """Records by name.

    Raises:
        DataError: if it is no such table, or a device in it says what no record may; line and column are named.
    """
    try:
        rows = list(csv.DictReader(read_text(path, TABLE).splitlines()))
    except csv.Error as error:
        told = " ".join(str(error).split())[:160]
        raise DataError(f"{path} is no table of devices ({told})", "Allowed: CSV, as UTF-8") from error
    missing = [name for name in REQUIRED if not rows or name not in rows[0]]
    if missing:
        raise DataError(
            f"{path} lacks the columns {', '.join(missing)}", f"Every table of devices has {', '.join(REQUIRED)}"
        )
    records: dict[str, DeviceRecord] = {}
    for line, row in enumerate(rows, start=2):
        entry = _record(row, f"{path} line {line}")
        if entry.name in records:
            raise DataError(f"{path} line {line}: {entry.name} is there twice", mend="Keep one of them")
        records[entry.name] = entry
    return records


def _record(row: Mapping[str, str], where: str) -> DeviceRecord:
    data: dict[str, object] = {"name": row["gpu"], "kind": "gpu", "peak_flops": _rates(row, where)}
    for column, name in TEXTS.items():
        if row.get(column):
            data[name] = row[column]
    data["source"] = f"gpus.csv: {data.get('source', 'no source stated')}"
    for column, (name, factor, whole) in FIELDS.items():
        value = _number(row, column, where)
        if value is not None:
            data[name] = round(value * factor) if whole else value * factor
    try:
        return DeviceRecord.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{where}: {place} of {row['gpu']!r}: {first['msg']}", mend="Correct the row") from error


def _rates(row: Mapping[str, str], where: str) -> dict[str, float]:
    rates = {}
    for column, name in RATES.items():
        value = _number(row, column, where)
        if value is not None:
            rates[name] = value * 1e12
    if rates.get("fp32_matrix") == rates.get("fp32"):
        rates.pop("fp32_matrix", None)
    return rates


def _number(row: Mapping[str, str], column: str, where: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{where}: {column} is {text[:40]!r}", "A number above zero, or nothing where it is not known")
    return value
