"""How long commands take that have nothing to do: ours beside those of tools that people run.

    python benchmarks/startup.py [--smoke] [--json OUT] [--python PYTHON] [--rounds 9]

`pdv --help` and a simulation of Llama-3-8B under `--manual` beside `torchrun --help` and `accelerate estimate-memory`
(its help: a model's sizes it would fetch from a network), each as `PYTHON -m`, in turns in one run. PYTHON may be that
of an environment with the wheel alone. Medians of seconds, and of CPU-seconds, which other work changes less. What is
not installed is left out, and named.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.record import ROOT, Record, arguments

ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # what is installed there
CLUSTER = ROOT / "examples" / "clusters" / "8x8-h100.yaml"
SIMULATE = f"pdv simulate --arch llama-3-8b --cluster {CLUSTER} --batch 512 --manual tp=8"
COMMANDS = {
    "pdv --help": "pdv --help",
    "pdv simulate --arch": SIMULATE,
    "torchrun --help": "torch.distributed.run --help",
    "accelerate estimate-memory --help": "accelerate.commands.accelerate_cli estimate-memory --help",
}


def main() -> None:
    """Time all commands in turns."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter (default: this one)")
    parser.add_argument("--rounds", type=int, default=9, help="of each command")
    options = parser.parse_args()
    there = {name: [options.python, "-m", *text.split()] for name, text in COMMANDS.items()}
    for name, words in list(there.items()):
        if not runs(words):  # which also fills the caches of files and of compiled modules
            print(f"{name}: left out, it does not run here")
            del there[name]
    record = Record()
    for turn in range(1 if options.smoke else options.rounds):
        for name, words in there.items():
            wall_s, cpu_s = seconds(words)
            record.rows.append({"command": name, "round": turn, "wall_s": wall_s, "cpu_s": cpu_s})
    for name in there:
        for kind, what in (("wall_s", ""), ("cpu_s", ", CPU")):
            taken = [row[kind] for row in record.rows if row["command"] == name]
            record.claim(f"{name}{what}", statistics.median(taken), "s", f"{min(taken):.2f} to {max(taken):.2f}")
    record.print_summary()
    record.write(options.json)


def runs(words: Sequence[str]) -> bool:
    """Whether a command is there and ends well."""
    return subprocess.run(words, capture_output=True, cwd=tempfile.gettempdir(), env=ALONE, check=False).returncode == 0


def seconds(words: Sequence[str]) -> tuple[float, float]:
    """From start to end of one process, and the CPU-seconds of it and its children."""
    started, before = time.perf_counter(), os.times()
    subprocess.run(words, capture_output=True, cwd=tempfile.gettempdir(), env=ALONE, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - started, spent


if __name__ == "__main__":
    main()
