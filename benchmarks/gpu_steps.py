"""Whole training steps of emitted programs on one GPU, beside what was predicted of them: time, its parts, memory.

    python benchmarks/gpu_steps.py [--smoke] [--cases A,B] [--folder DIR] [--prepare] [--json OUT]
    python benchmarks/gpu_steps.py --rescore RECORD [--folder DIR]

Each case is a model planned for one device with its settings pinned, then built and stepped there; numbers of weights
do not matter to time, so packages are kept without (--prepare, on a machine that need not have the GPU) and filled with
random ones where they run. Pairs of cases of one model that differ by more than 10 % are counted, too: are they in the
order predicted? --rescore scores what a record has measured, by the plans that a folder has. Without a GPU: the
smallest case, on a core.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import pdv
from benchmarks.measured.devices import default_device, label, one_device
from benchmarks.models import build, token_ids
from benchmarks.record import Record, arguments, table
from learned_cost.profile.steps import Calls, Steps
from pdv.cluster import Cluster, load_cluster
from pdv.measure.bench import Asked, request_of
from pdv.plan.package import read_document
from pdv.prices import priced_by
from pdv.report.loaded import load_plan, workload_of_plan
from pdv.simulate.step import simulate

APART = 0.1  # of the faster one: pairs closer than that are not ordered
BUDGET_S = 1.5  # of a case's steps
WEIGHT_STD = 0.02
TARGET = "h100-80gb-sxm"  # of packages that are prepared where there is no GPU
REQUEST, WEIGHTS = "request.json", "weights.safetensors"
Row = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class Case:
    """A model of the set, what `pdv.optimize` is told, and whether the plan is of a compiled program."""

    name: str
    model: str
    batch: int
    sequence: int = 0
    options: dict[str, Any] = field(default_factory=lambda: {"dtype": "bfloat16"})
    compiled: bool = False
    size: Any = "full"


def cases() -> list[Case]:
    """Models that wait for the device, or the host; and of two of them every way in which a step may run."""
    half = {"dtype": "bfloat16"}
    mixed = {**half, "precision": "mixed"}
    ways = {
        "": half, " mixed": mixed, " again": {**half, "recompute": "full"}, " in 4": {**half, "micro_batches": 4},
        " fp8": {**mixed, "products": "fp8"}, " fp8 by rows": {**mixed, "products": "fp8-rowwise"},
    }  # fmt: skip
    found = [Case(f"gpt2{way}", "gpt2", 8, 1024, options) for way, options in ways.items()]
    found += [Case(f"llama-1b{way}", "llama", 4, 1024, options) for way, options in ways.items()]
    found += [
        Case("gpt2 float32", "gpt2", 8, 1024, {"dtype": "float32"}),
        Case("gpt2 x 4", "gpt2", 32, 1024),
        Case("gpt2 short", "gpt2", 8, 64),
        Case("bert-large", "bert-large", 16, 512),
        Case("bert-large mixed", "bert-large", 16, 512, mixed),
        Case("bert-large again", "bert-large", 16, 512, {**half, "recompute": "full"}),
        Case("vit", "vit", 64),
        Case("vit float32", "vit", 64, options={"dtype": "float32"}),
        Case("resnet50", "resnet50", 64),
        Case("resnet50 float32", "resnet50", 64, options={"dtype": "float32"}),
        Case("inception-v3", "inception-v3", 32),
        Case("mixtral layer", "mixtral", 1, 1024),
        Case("gpt2 infer", "gpt2", 8, 1024, {**half, "mode": "infer"}),
        Case("llama-1b infer", "llama", 4, 1024, {**half, "mode": "infer"}),
        Case("gpt2 compiled", "gpt2", 8, 1024, compiled=True),
        Case("gpt2 mixed compiled", "gpt2", 8, 1024, mixed, compiled=True),
        Case("bert-large compiled", "bert-large", 16, 512, compiled=True),
        Case("vit compiled", "vit", 64, compiled=True),
    ]
    return found


SMALL = Case("gpt2 small", "gpt2", 8, 16, {}, size="small")


def main() -> None:
    """Prepare, run and score the cases that are asked for."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--cases", default="", help="only these, comma-separated")
    parser.add_argument("--folder", type=Path, help="where packages are, and are kept")
    parser.add_argument("--prepare", action="store_true", help="only write the packages")
    parser.add_argument("--run", action="store_true", help="only run them, and keep what was measured")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after so many")
    parser.add_argument("--rescore", type=Path, metavar="RECORD", help="predict what a record has measured")
    options = parser.parse_args()
    started = time.monotonic()
    chosen = [SMALL] if options.smoke else cases()
    wanted = [case for case in chosen if not options.cases or case.name in options.cases.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if options.rescore is None:
            prepare(folder, wanted)
        if options.prepare:
            return
        record = Record(rows=json.loads(options.rescore.read_text())["rows"] if options.rescore else [])
        if options.rescore is None:
            for case in wanted:
                if time.monotonic() - started < options.seconds:
                    record.rows.append(run(folder, case))
                    record.write(options.json)
        if not options.run:
            score(record, folder)
        record.write(options.json or options.rescore)


# ---- Packages ----


def package_of(folder: Path, case: Case) -> Path:
    """Where a case's package lies."""
    return folder / (case.name.replace(" ", "_").replace("-", "_") + "_pdv")


def prepare(folder: Path, wanted: Sequence[Case]) -> None:
    """Write the packages that are not there, several at once."""
    lacking = [case for case in wanted if not package_of(folder, case).exists()]
    device = default_device()
    cluster = one_device(device)
    if device.type == "cpu" and any(case.size == "full" for case in lacking):
        cluster = load_cluster({"name": TARGET, "nodes": [{"devices": 1, "device": TARGET}]})
    folder.mkdir(parents=True, exist_ok=True)
    workers = max(1, min(len(lacking), (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(_prepare, [(folder, case, cluster) for case in lacking]))


def _prepare(asked: tuple[Path, Case, Cluster]) -> None:
    """A case's package, the tensors of its weights cut off behind their names and shapes."""
    folder, case, cluster = asked
    torch.set_num_threads(1)
    module, inputs = build(case.model, case.size, batch=case.batch)
    if case.sequence:
        vocabulary = int(module.config.vocab_size)  # type: ignore[union-attr, arg-type]  # transformers' own
        inputs = token_ids(vocabulary, case.batch, case.sequence)
    module.train(case.options.get("mode", "train") == "train")
    own = {"compiled": case.compiled, **case.options}
    plan = pdv.optimize(module, inputs, cluster=cluster, check=False, cache=None, **own)
    package = plan.save(package_of(folder, case), overwrite=True)
    (package / REQUEST).write_text(json.dumps(request_for(package, "cpu" if case.size == "small" else "cuda")))
    empty(package)
    print(f"{case.name}: planned, {plan.document['predicted']['step_time_s']['mean'] * 1e3:.2f} ms", flush=True)


def empty(package: Path) -> None:
    """Cut the tensors of its weights off, behind their names and shapes."""
    with (package / WEIGHTS).open("r+b") as file:
        file.truncate(8 + int.from_bytes(file.read(8), "little"))


def fill(path: Path, device: torch.device) -> None:
    """Random numbers for the tensors that a weights file names; integers are zero."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = [entry for name, entry in json.loads(file.read(length)).items() if name != "__metadata__"]
        entries.sort(key=lambda entry: entry["data_offsets"])
        file.truncate(8 + length)
        types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        for entry in entries:
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in types:
                file.write(bytes(end - begin))
                continue
            values = torch.randn(entry["shape"], device=device).mul_(WEIGHT_STD).to(types[entry["dtype"]])
            file.write(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


# ---- Steps ----


def run(folder: Path, case: Case) -> Row:
    """What a case's steps took, or why there were none."""
    row: Row = {"case": case.name, "model": case.model, "compiled": case.compiled, "asked": asdict(case)}
    started, device = time.monotonic(), default_device()
    torch.cuda.is_available() and torch.cuda.empty_cache()
    try:
        row |= {"device": label(device), "measured": measure(package_of(folder, case), case, device)}
        took = row["measured"]
        print(f"{case.name}: {took['step_s'] * 1e3:.2f} ms, {took['peak_bytes'] / 2**30:.2f} GiB", end="", flush=True)
    except Exception as error:  # noqa: BLE001  # one case's failure is told, and the others go on
        traceback.print_exc()
        row["failed"] = f"{type(error).__name__}: {error}"[:2000]
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()
    row["wall_s"] = time.monotonic() - started
    print(f" ({row['wall_s']:.0f} s)", flush=True)
    return row


def measure(package: Path, case: Case, device: torch.device) -> Row:
    """A package built and stepped in this process."""
    request = json.loads((package / REQUEST).read_text()) | {"device": device.type}
    fill(package / WEIGHTS, device)
    sys.path.insert(0, str(package.parent.resolve()))
    try:
        model: Any = importlib.import_module(package.name).build(device=str(device))
    finally:
        sys.path.pop(0)
        empty(package)
    return Steps(model, request, Calls(device)).run(BUDGET_S)


def request_for(package: Path, device: str) -> Row:
    """What `learned_cost.profile.steps` is told of a package."""
    plan = load_plan(package, priced_by(read_document(package), None))
    return request_of(plan, Asked(package, None), device)


# ---- Predictions ----


def score(record: Record, folder: Path) -> None:
    """What was predicted of each case that ran; claim errors of time and memory, and pairs in order."""
    known = {case.name: case for case in [*cases(), SMALL]}
    done = [row for row in record.rows if "measured" in row and row["case"] in known]
    for row in done:
        package = package_of(folder, known[row["case"]])
        if package.exists():
            row["predicted"] = predict(package)
    show(done)
    eager = [row for row in done if not row["compiled"]]
    if eager:
        errors = [_step(row, "predicted") / _step(row, "measured") - 1 for row in eager]
        memory = [abs(_memory(row)) for row in eager]
        record.claim("eager steps: mean error of the time", 100 * statistics.mean(map(abs, errors)), "%")
        record.claim("eager steps: worst error of the time", 100 * max(errors, key=abs), "%")
        record.claim("eager steps: mean error of the peak", 100 * statistics.mean(memory), "%")
        inside = [abs(_step(row, "predicted") - _step(row, "measured")) <= 1.645 * _std(row) for row in eager]
        record.claim("eager steps in their 90 % interval", 100 * statistics.mean(inside), "%")
    pairs = [
        (_step(one, "measured") < _step(two, "measured")) == (_step(one, "predicted") < _step(two, "predicted"))
        for one, two in itertools.combinations(eager, 2)
        if one["model"] == two["model"] and _apart(_step(one, "measured"), _step(two, "measured")) > APART
    ]
    if pairs:
        record.claim("pairs of one model more than 10 % apart", len(pairs), "pairs")
        record.claim("such pairs in order", 100 * statistics.mean(pairs), "%")
    record.claim("cases that failed", sum("failed" in row for row in record.rows), "")
    record.print_summary()


def predict(package: Path) -> Row:
    """What this version says of a plan, whichever version made it."""
    document = read_document(package)
    found = simulate(workload_of_plan(load_plan(package, priced_by(document, None))))
    step_s = {"mean": found.step_s, "std": found.std_s}
    return {"step_time_s": step_s, "breakdown_s": found.totals, "memory_bytes": document["predicted"]["memory_bytes"]}


def _step(row: Row, which: str) -> float:
    return float(row["measured"]["step_s"] if which == "measured" else row["predicted"]["step_time_s"]["mean"])


def _std(row: Row) -> float:
    return float(row["predicted"]["step_time_s"]["std"])


def _memory(row: Row) -> float:
    return float(max(row["predicted"]["memory_bytes"].values()) / row["measured"]["peak_bytes"] - 1)


def _optimizer(row: Row) -> float:
    return float(row["predicted"]["breakdown_s"].get("optimizer", 0.0))


def _apart(one: float, two: float) -> float:
    return abs(one - two) / min(one, two)


def show(rows: Sequence[Row]) -> None:
    """A line per case."""
    lines = [
        (
            row["case"],
            *(f"{_step(row, which) * 1e3:.2f}" for which in ("predicted", "measured")),
            f"{_step(row, 'predicted') / _step(row, 'measured') - 1:+.1%}",
            f"{_optimizer(row) * 1e3:.2f} / {row['measured']['optimizer_s'] * 1e3:.2f}",
            f"{_memory(row):+.1%}",
        )
        for row in rows
    ]
    table(("case", "predicted ms", "measured ms", "error", "optimizer", "peak"), lines)


if __name__ == "__main__":
    main()
