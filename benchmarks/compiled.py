"""Plans that are compiled beside the same plans eager: is what a step gains by that predicted, and the order right?

    python benchmarks/compiled.py [--smoke] [--models A,B] [--json OUT]

Each model is planned twice for one device, once as it is and once with `compiled=True`; both programs are built there,
and train in turns, step by step, forward, loss, backward and AdamW. On a CPU: one thread. A pair of plans is in order
if the one predicted faster is; pairs of different models are counted, too, where steps are more than 10 % apart.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pdv
from benchmarks.measured.devices import default_device, one_device
from benchmarks.models import Size, build, token_ids
from benchmarks.record import Record, arguments, table
from pdv.plan.package import import_package

APART = 0.1
TURNS, WARM = 15, 3
Case = tuple[str, Size, int, int]  # model, size, batch, length of sequences
SMALL: tuple[Case, ...] = (("gpt2", "small", 8, 16),)
CPU: tuple[Case, ...] = (
    ("gpt2", "full", 2, 64), ("bert", "full", 1, 128), ("llama", "small", 8, 32), ("vit", "full", 1, 0),
    ("resnet50", "full", 2, 0), ("inception-v3", "full", 1, 0), ("squeezenet", "full", 2, 0), ("mlp", "small", 64, 0),
)  # fmt: skip
GPU: tuple[Case, ...] = (
    ("gpt2", "full", 8, 1024), ("bert-large", "full", 16, 512), ("llama", "full", 4, 1024), ("vit", "full", 64, 0),
    ("resnet50", "full", 64, 0),
)  # fmt: skip


def main() -> None:
    """Plan, train in turns, and count."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--models", default="", help="only these, comma-separated")
    options = parser.parse_args()
    device, record = default_device(), Record()
    torch.set_num_threads(1)
    chosen = SMALL if options.smoke else CPU if device.type == "cpu" else GPU
    for case in chosen:
        if not options.models or case[0] in options.models.split(","):
            record.rows += _compare(case, device, 2 if options.smoke else TURNS)
            record.write(options.json)
    _claim(record)
    record.write(options.json)


def _compare(case: Case, device: torch.device, turns: int) -> list[dict[str, Any]]:  # Any: JSON
    """Rows of the two plans of a case."""
    name, size, batch, length = case
    rows, steps = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for compiled in (False, True):
            module, inputs = build(name, size, batch=batch)
            if length:
                inputs = token_ids(int(module.config.vocab_size), batch, length)  # type: ignore[union-attr, arg-type]  # transformers' own
            dtype = None if device.type == "cpu" else "bfloat16"
            plan = pdv.optimize(
                module.train(), inputs, cluster=one_device(device), dtype=dtype, check=False, compiled=compiled
            )
            package = plan.save(Path(scratch) / f"{name.replace('-', '_')}_{compiled}_pdv")
            steps.append(_step(import_package(package).build(device), inputs, device))
            predicted = plan.document["predicted"]["step_time_s"]["mean"]
            rows.append({"case": f"{name} {size}", "compiled": compiled, "predicted_s": predicted})
        taken: list[list[float]] = [[], []]
        for turn in range(turns + WARM):
            for number, step in enumerate(steps):
                started = time.perf_counter()
                step()
                if turn >= WARM:
                    taken[number].append(time.perf_counter() - started)
    for row, seconds in zip(rows, taken, strict=True):
        row["measured_s"] = statistics.median(seconds)
    predicted, measured = (rows[1][key] / rows[0][key] for key in ("predicted_s", "measured_s"))
    print(f"{name}: compiled over eager, predicted {predicted:.3f}, measured {measured:.3f}", flush=True)
    return rows


def _step(model: Any, inputs: tuple[torch.Tensor, ...], device: torch.device) -> Callable[[], None]:
    """A training step of the emitted program."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given = [tensor.to(device) for tensor in inputs]

    def step() -> None:
        optimizer.zero_grad()
        model(*given).float().square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def _claim(record: Record) -> None:
    """Errors, and pairs in order."""
    lines = [
        [row["case"], "compiled" if row["compiled"] else "eager", *(f"{row[key] * 1e3:.2f}" for key in KEYS)]
        for row in record.rows
    ]
    table(["model", "program", "predicted, ms", "measured, ms"], lines)
    for compiled, what in ((False, "eager"), (True, "compiled")):
        own = [row for row in record.rows if row["compiled"] == compiled]
        errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in own]
        record.claim(f"{what} steps: mean error", 100 * statistics.mean(errors), "%", "")
        record.claim(f"{what}: pairs in order", _in_order(own), "%", "")
    gains = [
        (two["predicted_s"] / one["predicted_s"]) / (two["measured_s"] / one["measured_s"]) - 1
        for one, two in zip(record.rows[::2], record.rows[1::2], strict=True)
    ]
    record.claim("compiled over eager: mean error of the ratio", 100 * statistics.mean(map(abs, gains)), "%", "")


KEYS = ("predicted_s", "measured_s")


def _in_order(rows: list[dict[str, Any]]) -> float:  # Any: JSON
    """Of pairs that are more than APART apart, the part whose order is predicted."""
    pairs = [
        (one, two)
        for one, two in itertools.combinations(rows, 2)
        if max(one["measured_s"], two["measured_s"]) > (1 + APART) * min(one["measured_s"], two["measured_s"])
    ]
    right = [(a["predicted_s"] < b["predicted_s"]) == (a["measured_s"] < b["measured_s"]) for a, b in pairs]
    return 100 * sum(right) / len(right) if right else 100.0


if __name__ == "__main__":
    main()
