"""The whole way once: GPT-2 to ONNX, planned for four processes, trained on them, beside one device and beside DDP.

python -m examples.demo            GPT-2 124M, some minutes on two cores
python -m examples.demo --small    two narrow layers, in seconds
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4  # relative, float32: what sums in another order may differ by over 20 steps
PROCESSES = 4
ROUNDS = 5  # of steps beside DDP


@dataclass(frozen=True)
class Size:
    """The batch that the demo trains on."""

    name: str
    batch: int
    sequence: int
    vocabulary: int


SIZES = {"full": Size("full", 4, 64, 50257), "small": Size("small", 8, 16, 128)}


def main() -> None:
    """Run all steps; exit with 1 if the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="two narrow layers instead of GPT-2 124M")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cluster", type=Path, help="default: this machine, at the speed that it has now")
    parser.add_argument("--cost", default="measured", help="what prices kernels: as pdv optimize --cost")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    options = parser.parse_args()
    size = SIZES["small" if options.small else "full"]
    if options.output.exists():
        shutil.rmtree(options.output)
    options.output.mkdir(parents=True)

    say("1/5 exporting GPT-2 to ONNX")
    model = options.output / "gpt2.onnx"
    expected = export_and_train(model, size, options.steps)
    cluster = options.cluster or detect(options.output / "cluster.yaml")
    say(f"2/5 planning it for {cluster.name}")
    package = options.output / "gpt2_pdv"
    run("-m", "pdv", "optimize", str(model), "--cluster", str(cluster), "--cost", options.cost, "-o", str(package))
    say(f"3/5 training the emitted program on {PROCESSES} processes, {options.steps} steps")
    found, step_s = train_on_processes(package, size, options.steps, options.output / "losses.json")
    rounds = min(options.steps, ROUNDS)
    say(f"4/5 its steps and those of DistributedDataParallel in turns, {rounds} of each")
    times = beside_ddp(package, size, rounds, options.output / "beside-ddp.json")
    say("5/5 comparing")
    compare_times(json.loads((package / "plan.json").read_text())["predicted"], step_s)
    compare_steps(times)
    sys.exit(compare(expected, found))


def detect(path: Path) -> Path:
    """The machine at hand as a cluster file: its processes, what each gets of a core, and how fast that is now."""
    run("-m", "pdv", "cluster", "detect", "--device", "cpu-core", "--count", str(PROCESSES), "-o", str(path))
    return path


def compare_times(predicted: Mapping[str, Any], step_s: float) -> None:
    """Print the predicted step time with its source, and the measured one."""
    mean, std = predicted["step_time_s"]["mean"], predicted["step_time_s"]["std"]
    print(f"step time: predicted {mean * 1e3:.0f} ± {std * 1e3:.0f} ms ({predicted['source']})")
    print(f"           measured {step_s * 1e3:.0f} ms (median); predicted is {mean / step_s - 1:+.0%} off")


def compare_steps(times: Mapping[str, float]) -> None:
    """Print the medians of steps that took turns."""
    plan, ddp = times["plan"], times["ddp"]
    print(
        f"in turns:  this plan {plan * 1e3:.0f} ms, DistributedDataParallel {ddp * 1e3:.0f} ms: {ddp / plan:.2f} times"
    )


def export_and_train(path: Path, size: Size, steps: int) -> list[float]:
    """Write the model as ONNX, then train the very module on one device; its losses."""
    import torch
    from torch.nn.functional import cross_entropy

    from benchmarks.models import build
    from examples.text import batches
    from pdv.frontend.onnx.export import export_onnx

    module, inputs = build("gpt2", "full" if size.name == "full" else "small", batch=size.batch)
    export_onnx(module, inputs, path)
    say(f"    and training it on one device, {steps} steps")
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
    losses = []
    for x, y in batches(steps, size.batch, size.sequence, size.vocabulary):
        loss = cross_entropy(module(x).flatten(0, 1), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_on_processes(package: Path, size: Size, steps: int, losses: Path) -> tuple[list[float], float]:
    """The losses of the emitted program under torchrun, and the median seconds of a step."""
    launch(size, str(ROOT / "examples/train.py"), str(package), f"--steps={steps}", f"--losses={losses}")
    written = json.loads(losses.read_text())
    return [float(loss) for loss in written["losses"]], float(written["step_s"])


def beside_ddp(package: Path, size: Size, rounds: int, times: Path) -> dict[str, float]:
    """Median seconds of a step of the emitted program and of the module under DDP, by name."""
    script = "-m", "examples.beside_ddp"
    launch(size, *script, str(package), f"--size={size.name}", f"--rounds={rounds}", f"--times={times}")
    found: dict[str, float] = json.loads(times.read_text())
    return found


def launch(size: Size, *words: str) -> None:
    """Run a program on all processes under torchrun, with the batch's sizes as options."""
    sizes = f"--batch={size.batch}", f"--sequence={size.sequence}", f"--vocabulary={size.vocabulary}"
    run("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}", *words, *sizes)


def compare(expected: list[float], found: list[float]) -> int:
    """Print the losses side by side; 0 if they agree within the tolerance."""
    print(f"{'step':>4} {'one device':>12} {f'{PROCESSES} processes':>12} {'difference':>11}")
    worst = 0.0
    for step, (one, many) in enumerate(zip(expected, found, strict=True)):
        difference = abs(many - one) / abs(one)
        worst = max(worst, difference)
        print(f"{step:>4} {one:>12.6f} {many:>12.6f} {difference:>11.1e}")
    equal = worst <= TOLERANCE
    print(f"largest relative difference {worst:.1e}: {'equal' if equal else 'NOT equal'} within {TOLERANCE:.0e}")
    return 0 if equal else 1


def run(*arguments: str) -> None:
    """Run Python with these arguments, one thread a process; stop here if it fails."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    status = subprocess.run([sys.executable, *arguments], check=False, env=environment, cwd=ROOT).returncode
    if status:
        sys.exit(status)


def say(message: str) -> None:
    """A line of progress, at once."""
    print(message, flush=True)


if __name__ == "__main__":
    main()
