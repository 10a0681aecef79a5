"""Runs a page of the documentation as a reader would: from an empty environment, with the wheel alone.

    python -m tools.tutorial [--page docs/tutorial.md] [--wheel FILE]

Of the page, a block of Python or YAML whose first line names a file is written to it, a block of sh is run, line by
line in one shell, and a block of text has to be what the commands before it printed: lines in their order, where ``…``
stands for any others. Numbers may be off by a fifth, as prices and machines change; those with four decimals, which are
there to be compared, by 0.002. What it may take is told in CPU-seconds, which other work on the machine does not
change. Entry points: ``read_page``, ``explain_difference``, ``main``.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(sh|text|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
PRELUDE = "set -eu\nif [ -e env/bin/activate ]; then . env/bin/activate; fi\n"
LIMIT_CPU_S = 600  # ten minutes of one core


@dataclass(frozen=True)
class Step:
    """One block: a file to write (named), commands to run, or what they have to have printed."""

    kind: Literal["file", "run", "expect"]
    text: str
    name: str = ""


def read_page(text: str) -> list[Step]:
    """The steps of a page in their order."""
    kinds: dict[str, Literal["run", "expect"]] = {"sh": "run", "text": "expect"}
    steps = []
    for language, block in BLOCK.findall(text):
        if language in kinds:
            steps.append(Step(kinds[language], block))
        elif named := re.match(r"# ([\w.]+)\n", block):
            steps.append(Step("file", block, named[1]))
    return steps


def explain_difference(expected: str, printed: str) -> str:
    """The first expected line that is not among the printed ones, behind those before it; empty where all are."""
    lines = iter(printed.splitlines())
    for line in expected.splitlines():
        if line.strip() != "…" and not any(alike(line, other) for other in lines):
            return f"not printed, or not there: {line!r}"
    return ""


def alike(line: str, other: str) -> bool:
    """Whether two lines have the same words, and numbers that are near each other."""
    if NUMBER.sub("#", line).split() != NUMBER.sub("#", other).split():
        return False
    return all(_near(a, b) for a, b in zip(NUMBER.findall(line), NUMBER.findall(other), strict=True))


def _near(a: str, b: str) -> bool:
    exact = len(a.partition(".")[2]) >= 4
    return abs(float(a) - float(b)) <= (0.002 if exact else 0.2 * max(float(a), float(b)))


def run_page(steps: Sequence[Step], folder: Path) -> None:
    """Do all steps in a folder.

    Raises:
        SystemExit: where a command fails, or prints something else.
    """
    printed = ""
    for step in steps:
        if step.kind == "file":
            (folder / step.name).write_text(step.text, encoding="utf-8")
        elif step.kind == "run":
            started, before = time.monotonic(), _cpu_s()
            done = subprocess.run(
                ["bash", "-c", PRELUDE + step.text],
                cwd=folder, env=environment(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            took, spent = time.monotonic() - started, _cpu_s() - before
            print(f"{took:6.1f} s {spent:6.1f} CPU-s  {'; '.join(step.text.splitlines())}", flush=True)
            if done.returncode:
                raise SystemExit(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
            printed = done.stdout
        elif difference := explain_difference(step.text, printed):
            raise SystemExit(f"{difference}\nprinted was:\n{printed}")


def _cpu_s() -> float:
    """Of all processes that were started here and have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def environment() -> dict[str, str]:
    """That of this process without what leads to the checkout; versions of packages are those of constraints.txt."""
    mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    outside = [each for each in mine["PATH"].split(":") if not Path(each).is_relative_to(Path(sys.prefix))]
    return mine | {
        "PATH": ":".join(outside),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_QUIET": "1",
        "OMP_NUM_THREADS": "1",
    }


def main() -> None:
    """Build the wheel, run the page in a new folder, and say how long it took."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "tutorial.md")
    parser.add_argument("--wheel", type=Path, help="take this one (default: built of this checkout)")
    options = parser.parse_args()
    steps = read_page(options.page.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        if options.wheel:
            shutil.copy(options.wheel, folder)
        else:
            build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, str(ROOT)]
            subprocess.run(build, check=True)
        started, before = time.monotonic(), _cpu_s()
        run_page(steps, Path(folder))
        took, cpu_s = time.monotonic() - started, _cpu_s() - before
    print(f"{took:6.1f} s {cpu_s:6.1f} CPU-s  {options.page.name}, {len(steps)} blocks")
    if cpu_s > LIMIT_CPU_S:
        raise SystemExit(f"more than {LIMIT_CPU_S} CPU-s")


if __name__ == "__main__":
    main()
