"""Steps of emitted programs against the same plans by hand: DDP, FSDP2, tensor parallel; AdamW against plain tensors.

    python benchmarks/emitted.py [--task gpt-256] [--rounds 30] [--only DDP ...] [--json OUT] [--smoke]

Four processes on this machine. One process group has both programs of a pair, and steps them in turn; a step is
forward, loss, backward and AdamW, from a barrier to the end of the slowest rank. Both are checked against one process
first. A ratio is that of medians, with its 90 % bootstrap interval over the rounds.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster_runs.measure import LOSS_TOLERANCE, alternate, check, mesh_of, reference
from benchmarks.cluster_runs.megatron import Megatron
from benchmarks.cluster_runs.models import TASKS, Task
from benchmarks.cluster_runs.trainers import DataParallel, FullyShard, Package, Place, Settings, Trainer, adamw
from benchmarks.models.techniques import Technique, forced_plan
from benchmarks.record import ROOT, Record, arguments, environment, table
from ir.graph import Node
from ir.sharding import Invariant, State
from pdv.emit.package import emit_package
from pdv.frontend import load_program

WORLD, DRAWS, LIMIT_S = 4, 2000, 570
OWN = "emitted"
Row = dict[str, Any]  # Any: JSON


class DataParallelTechnique(Technique):
    """Parameters rest whole."""

    def stores(self, param: Node, axis: str, state: State) -> bool:
        """See Technique."""
        del param, axis
        return isinstance(state, Invariant)


DATA = DataParallelTechnique("dp", (("dp", WORLD),))
# the plan by hand, with its settings, and what forces the emitted one into the same
PAIRS: dict[str, tuple[Callable[[Place, Settings], Trainer], Settings, Technique]] = {
    "DDP": (DataParallel, {"micro": 1, "bucket": 4}, DATA),
    "DDP, 25 MB": (DataParallel, {"micro": 1, "bucket": 25}, DATA),
    "FSDP2": (FullyShard, {"micro": 1, "shape": "flat", "reshard": True}, Technique("z", (("dp", WORLD),), zero=True)),
    "tensor parallel": (Megatron, {}, Technique("tp", (("tp", WORLD),))),
}


class Emitted(Package):
    """A package, with the optimizer that the programs by hand have."""

    def __init__(self, place: Place, settings: Settings) -> None:
        super().__init__(place, settings)
        self.optimizer = adamw(self.model.parameters())


def main() -> None:
    """Each pair in processes of its own."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--task", default="gpt-256", choices=list(TASKS))
    parser.add_argument("--rounds", type=int, default=30, help="steps of each program")
    parser.add_argument("--only", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--rank", nargs=2, metavar=("RANK", "SPEC"), help="a rank of the benchmark itself")
    options = parser.parse_args()
    if options.rank:
        run_rank(int(options.rank[0]), json.loads(Path(options.rank[1]).read_text()))
        return
    if options.smoke:
        options.task, options.rounds, options.only = "tiny", 3, ["DDP"]
    record = Record()
    for name in options.only:
        record.rows.append(run_pair(name, options.task, options.rounds))
        record.write(options.json)
    tell(record)
    record.write(options.json)


def run_pair(name: str, task: str, rounds: int) -> Row:
    """Emit the plan, and run it beside the one by hand."""
    technique = PAIRS[name][2]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, f"emitted_{technique.name}")
        package.mkdir()
        program = load_program(TASKS[task].module(), (TASKS[task].batch()[0],))
        pcg = forced_plan(program.graph, technique)
        emit_package(pcg, technique.mesh, {"mode": "train"}, program.weights, package)
        spec = {"name": name, "task": task, "rounds": rounds, "package": str(package), "folder": folder}
        Path(folder, "spec.json").write_text(json.dumps(spec))
        words = [sys.executable, "-m", "benchmarks.emitted", "--rank"]
        ranks = [
            subprocess.Popen([*words, str(rank), str(Path(folder, "spec.json"))], cwd=ROOT, env=environment_of(rank),
                             start_new_session=True)
            for rank in range(WORLD)
        ]  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                    raise RuntimeError(f"{name}: a rank failed, or they took longer than {LIMIT_S} s")
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        found: Row = json.loads(Path(folder, "answer.json").read_text())
        return found


def environment_of(rank: int) -> dict[str, str]:
    """Of a rank: one thread, this repository's code."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "OMP_NUM_THREADS": 1}
    return environment(**{name: str(value) for name, value in variables.items()})


def run_rank(rank: int, spec: Row) -> None:
    """Check both programs, then step them in turn; then the optimizer beside one of plain tensors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec['folder']}/store", rank=rank, world_size=WORLD)
    task: Task = TASKS[spec["task"]]
    place = Place(task, (1.0,) * WORLD, mesh_of)
    make, settings, _ = PAIRS[spec["name"]]
    trainers = {OWN: Emitted(place, {"package": spec["package"]}), spec["name"]: make(place, settings)}
    expected = reference(task)
    for name, trainer in trainers.items():
        loss, gradient = check(trainer, expected)
        assert loss <= LOSS_TOLERANCE, f"{name}: loss off by {loss:.1e}, gradients by {gradient:.1e}"
    found: dict[str, Row] = {name: {"every": 1} for name in trainers}
    alternate(trainers, found, spec["rounds"])
    answer = {"pair": spec["name"], "task": spec["task"], "steps": found, "optimizer": optimizer_steps(trainers[OWN])}
    dist.barrier()
    if rank == 0:
        Path(spec["folder"], "answer.json").write_text(json.dumps(answer))


def optimizer_steps(trainer: Trainer, rounds: int = 40) -> dict[str, list[float]]:
    """CPU-seconds of AdamW's step on rank 0, on the emitted parameters and on plain tensors of the same sizes, in turn.

    The other ranks wait meanwhile.
    """
    found: dict[str, list[float]] = {}
    for how in ("fused", "foreach", "default"):
        options: dict[str, Any] = {} if how == "default" else {how: True}  # Any: booleans
        given = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        plain = [torch.nn.Parameter(p.detach().to_local().clone()) for p in given]
        steps = {"emitted": torch.optim.AdamW(given, **options), "plain": torch.optim.AdamW(plain, **options)}
        trainer.train()
        for p, own in zip(plain, given, strict=True):
            p.grad = own.grad.to_local().clone()
        for number in range(rounds if dist.get_rank() == 0 else 0):
            for name, optimizer in list(steps.items())[:: 1 if number % 2 else -1]:
                started = time.thread_time()
                optimizer.step()
                found.setdefault(f"{how} {name}", []).append(time.thread_time() - started)
        dist.barrier()
        trainer.optimizer.zero_grad()
    return found


def tell(record: Record) -> None:
    """The table, and what is claimed of it."""
    lines = []
    for row in record.rows:
        own, other = (row["steps"][name]["steps_s"] for name in (OWN, row["pair"]))
        middle, low, high = ratio(own, other)
        medians = (f"{statistics.median(steps) * 1e3:.1f}" for steps in (own, other))
        lines.append((row["task"], row["pair"], *medians, f"{middle:.3f}", f"{low:.3f}-{high:.3f}"))
        record.claim(f"emitted / {row['pair']}", middle, "", f"90 %: {low:.3f} to {high:.3f}, {len(own)} steps each")
    table(("task", "pair", "emitted ms", "by hand ms", "ratio", "90 %"), lines)
    for how in ("fused", "foreach", "default"):
        steps = [[x for row in record.rows for x in row["optimizer"][f"{how} {name}"]] for name in ("emitted", "plain")]
        middle, low, high = ratio(*steps)
        record.claim(f"AdamW, {how}: emitted / plain", middle, "", f"90 %: {low:.3f} to {high:.3f}")
    record.print_summary()


def ratio(own: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Of medians, and its 90 % bootstrap interval over rounds."""
    pairs, draw = list(zip(own, other, strict=True)), random.Random(0)
    drawn = [draw.choices(pairs, k=len(pairs)) for _ in range(DRAWS)]
    ratios = sorted(statistics.median(a for a, _ in some) / statistics.median(b for _, b in some) for some in drawn)
    return statistics.median(own) / statistics.median(other), ratios[int(0.05 * DRAWS)], ratios[int(0.95 * DRAWS)]


if __name__ == "__main__":
    main()
