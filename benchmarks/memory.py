"""Predicted against real peaks of memory: emitted programs take a step of AdamW, and their allocations are counted.

    python benchmarks/memory.py [--smoke] [--json OUT] [--models gpt2,bert] [--sizes small,full] [--plans one,zero+tp]

Each case is one model under one plan, forced by pins (benchmarks/models/techniques.py), on as many processes. On a CPU
torch's profiler counts every allocation; on GPUs ``torch.cuda.max_memory_allocated`` is read. Ranks hold the same, so
the least of several steps and ranks counts: gloo's threads let go of a collective's tensors late where cores are busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models.techniques import DP_TP, DP_TP_SP, TP_SP, ZERO2, ZERO4, ZERO_TP, Technique, forced_plan
from benchmarks.record import Record, arguments, environment, table

if TYPE_CHECKING:
    from pdv.frontend.program import Program
    from pdv.memory import StageMemory
    from pdv.problem.workload import Recompute

PLANS = {
    technique.name: technique
    for technique in (
        Technique("one", (("dp", 1),)), Technique("dp", (("dp", 2),)), Technique("tp", (("tp", 2),)),
        ZERO2, TP_SP, DP_TP, DP_TP_SP, ZERO4, ZERO_TP,
    )
}  # fmt: skip
WITHOUT_SEQUENCE = ("vit", "resnet50")  # 197 tokens are odd, and images have no sequence
ONLY_ROWS = ("resnet50",)


def main() -> None:
    """Run every case; print how far off predictions are."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--models", default="gpt2,llama,bert,vit,resnet50,mixtral", help="comma-separated")
    parser.add_argument("--sizes", default="small", help="comma-separated: small, full")
    parser.add_argument("--plans", default=",".join(PLANS), help="comma-separated")
    parser.add_argument("--batch", type=int, help="rows of the global batch; default: the model's own")
    parser.add_argument("--worker", type=Path, help="measure the package in this folder (what torchrun starts)")
    options = parser.parse_args()
    if options.worker:
        measure_here(options.worker)
        return
    if options.smoke:
        options.models, options.sizes, options.plans = "gpt2", "small", "one"
    record = Record()
    for name in options.models.split(","):
        for size in options.sizes.split(","):
            run_model(record, name, size, options.batch, options.plans.split(","))
    show(record)
    errors = sorted(abs(row["error"]) for row in record.rows)
    record.claim("largest error of the peak, relative", errors[-1], "")
    record.claim("mean error of the peak, relative", sum(errors) / len(errors), "")
    record.print_summary()
    record.write(options.json)


def show(record: Record) -> None:
    """The rows as a table."""
    rows: list[tuple[str, ...]] = []
    for row in record.rows:
        predicted, measured = (f"{row[key] / 1e6:.3f}" for key in ("predicted", "measured"))
        rows.append((row["case"], predicted, measured, f"{row['error']:+.1%}", row["when"]))
    table(("case", "predicted MB", "measured MB", "error", "when"), rows)


def run_model(record: Record, name: str, size: Any, batch: int | None, plans: list[str]) -> None:
    """All plans of one model."""
    program = program_of(name, size, batch)
    for plan in plans:
        technique = PLANS[plan]
        if (name in WITHOUT_SEQUENCE and technique.sequence) or (name in ONLY_ROWS and "tp" in dict(technique.sizes)):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            row = {"case": f"{name} {size}, {plan}", **run_case(program, technique, Path(scratch))}
        record.rows.append(row)
        print(row, file=sys.stderr)


def program_of(name: str, size: Any, batch: int | None) -> Program:
    """A benchmark model's graph and weights."""
    from benchmarks.models import build
    from pdv.frontend import load_program

    module, inputs = build(name, size, batch=batch)
    return load_program(module, inputs)


def run_case(program: Program, technique: Technique, scratch: Path) -> dict[str, Any]:
    """Predict, emit, measure a step under torchrun."""
    from pdv.emit.package import emit_package

    started = time.monotonic()
    pcg = forced_plan(program.graph, technique)
    predicted = predict(program, technique, pcg)
    package = scratch / "emitted_pdv"
    package.mkdir()
    emit_package(pcg, technique.mesh, {}, program.weights, package)
    facts = {
        "inputs": [[list(node.type.shape), node.type.dtype.value] for node in pcg.inputs],
        "output": list(pcg.outputs[0][1].type.shape),
    }
    (scratch / "facts.json").write_text(json.dumps(facts))
    measured = measure(scratch, technique.mesh.num_devices)
    return {
        "predicted": predicted.peak_bytes, "measured": min(measured), "measured_by_rank": measured,
        "error": predicted.peak_bytes / min(measured) - 1, "when": predicted.when,
        "by_kind": predicted.by_kind, "wall_s": time.monotonic() - started,
    }  # fmt: skip


def predict(program: Program, technique: Technique, pcg: Any, recompute: Recompute = "none") -> StageMemory:
    """What ``step_memory`` says of the emitted program, run as it is, or with what ``recompute`` says made again."""
    from benchmarks.models.techniques import CLUSTER
    from pdv.cluster import load_cluster
    from pdv.cost.comm import AxisLink
    from pdv.cost.compute import ComputeModel
    from pdv.memory import step_memory
    from pdv.problem import Problem
    from pdv.problem.workload import Execution, Stages, Workload

    cluster = load_cluster(CLUSTER)
    axes = tuple(AxisLink(axis.size, cluster.levels[-1].link) for axis in technique.mesh.axes)
    problem = Problem(program.graph, technique.mesh, axes, ComputeModel.of(cluster))
    device = replace(cluster.classes[0].device, kind="gpu" if on_gpu() else "cpu")
    cluster = replace(cluster, classes=tuple(replace(entry, device=device) for entry in cluster.classes))
    workload = Workload(
        problem, pcg, cluster, Stages(), Execution(recompute=recompute), (axes,), lambda d: ComputeModel((d,))
    )
    return step_memory(workload).worst


def on_gpu() -> bool:
    """True where processes take GPUs."""
    import torch

    return torch.cuda.is_available()


def measure(scratch: Path, processes: int) -> list[int]:
    """Peak bytes of each rank."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__, "--worker"]
    if processes == 1:
        command = [__file__, "--worker"]
    variables = environment(GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(
        [sys.executable, *command, str(scratch)], check=False, env=variables, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"a process that was measured ended with {done.returncode}:\n{done.stderr}")
    return [int((scratch / f"peak_{rank}").read_text()) for rank in range(processes)]


def measure_here(scratch: Path) -> None:
    """One rank's part."""
    import torch

    from benchmarks.measured.parity import load_package
    from learned_cost.profile.allocations import training_peak

    facts = json.loads((scratch / "facts.json").read_text())
    torch.manual_seed(0)
    inputs = tuple(example(shape, dtype) for shape, dtype in facts["inputs"])
    target = torch.randint(0, facts["output"][-1], facts["output"][:-1])
    model = load_package(scratch / "emitted_pdv").build()
    rank = int(os.environ.get("RANK", "0"))
    place = next(model.parameters()).device
    peak = training_peak(model, tuple(x.to(place) for x in inputs), target.to(place))
    (scratch / f"peak_{rank}").write_text(str(peak))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def example(shape: list[int], dtype: str) -> Any:
    """An input: random features, or ids that every table has."""
    import torch

    return torch.randn(shape) if dtype.startswith("f") else torch.randint(1, 8, shape)


if __name__ == "__main__":
    main()
