"""The form of every benchmark's result: what ran, where, and each figure claimed (docs/architecture.md)."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def environment(**more: str) -> dict[str, str]:
    """Of a process that a benchmark starts: one thread, and this repository's code before what is imported already."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@dataclass
class Record:
    """Rows as they were measured, and the figures that are claimed of them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: list[dict[str, Any]] = field(default_factory=list)

    def claim(self, name: str, value: float, unit: str, spread: str = "") -> None:
        """One figure, as README or an issue quotes it."""
        self.summary.append({"name": name, "value": value, "unit": unit, "spread": spread})

    def print_summary(self) -> None:
        """The figures, one a line."""
        for entry in self.summary:
            print(f"{entry['name']}: {entry['value']:.4g} {entry['unit']} {entry['spread']}".rstrip())

    def write(self, path: Path | None) -> None:
        """As one JSON object, if a path is given."""
        if path is None:
            return
        content = {
            "command": _command(sys.argv),
            "commit": _commit(),
            "versions": {name: metadata.version(name) for name in ("torch", "numpy", "onnx", "transformers")},
            "hardware": {"machine": platform.machine(), "cores": os.cpu_count(), "gpu": _gpu()},
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "rows": self.rows,
            "summary": self.summary,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="the smallest case only, to see that the script works")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the record here")
    return parser


def merged(path: Path | None, rows: list[dict[str, Any]], *key: str) -> list[dict[str, Any]]:
    """These rows, and those of the record that is at the path whose values under ``key`` no row here has."""
    if path is None or not path.is_file():
        return rows
    before = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return list({tuple(row[name] for name in key): row for row in (*before, *rows)}.values())


def part_of(text: str) -> slice:
    """Of a list what ``I/N`` says: each N-th, from the I-th on."""
    first, _, step = text.partition("/")
    return slice(int(first) - 1, None, int(step))


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _command(words: Sequence[str]) -> str:
    """As it was run; of folders outside the repository, the name alone."""
    inside = (word if not Path(word).is_absolute() else Path(word).name for word in words[1:])
    return " ".join(["python", f"benchmarks/{Path(words[0]).name}", *inside])


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
