"""Plan, export, and train in the engine: DDP, FSDP, tensor parallelism, pipeline and ZeRO on two CPU processes each.

    python examples/engines/launch.py [--only NAME …]

Each run's losses are held to those of one process; an engine that is not installed is left out, by name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLOSE = 1e-4  # largest difference of a loss (of about 5) that rounding may make
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
MINUTES = 10


@dataclass(frozen=True)
class Run:
    """A plan, an engine, and how its script is started.

    Attributes:
        plan: options of `pdv optimize`.
        engine, script: the engine's name for `pdv export`, and its training script here.
        needs: the package that it wants.
        start: words of Python before the script.
        environment: beside one's own.
        technique: of the one axis of two processes, where the plan is pinned to one.
    """

    plan: tuple[str, ...]
    engine: str
    script: str
    needs: str
    start: tuple[str, ...] = TORCHRUN
    environment: Mapping[str, str] | None = None
    technique: str = ""


CPU = {"ACCELERATE_USE_CPU": "true"}
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--config_file", "{file}")
DEEPSPEED = {"DS_ACCELERATOR": "cpu"}
PP = ("--stages", "2", "--micro-batches", "4", "--schedule", "1f1b")
RUNS = {
    "ddp-accelerate": Run((), "accelerate", "train_accelerate.py", "accelerate", ACCELERATE, CPU, "ddp"),
    "fsdp-transformers": Run((), "hf-tp-plan", "train_transformers.py", "transformers", technique="fsdp"),
    "tp-transformers": Run((), "hf-tp-plan", "train_transformers.py", "transformers", technique="tensor"),
    "pp-pytorch": Run(PP, "torchtitan", "train_pipelining.py", "transformers"),
    "ddp-torchtitan": Run((), "torchtitan", "train_torchtitan.py", "torchtitan", technique="ddp"),
    "fsdp-torchtitan": Run((), "torchtitan", "train_torchtitan.py", "torchtitan", technique="fsdp"),
    "tp-torchtitan": Run((), "torchtitan", "train_torchtitan.py", "torchtitan", technique="tensor"),
    "pp-torchtitan": Run(PP, "torchtitan", "train_torchtitan.py", "torchtitan"),
    "tp-megatron": Run((), "megatron", "train_megatron.py", "megatron", technique="tensor"),
    "ddp-deepspeed": Run((), "deepspeed", "train_deepspeed.py", "deepspeed", environment=DEEPSPEED, technique="ddp"),
    "zero3-deepspeed": Run((), "deepspeed", "train_deepspeed.py", "deepspeed", environment=DEEPSPEED, technique="fsdp"),
    "tp-deepspeed": Run((), "deepspeed", "train_deepspeed.py", "deepspeed", environment=DEEPSPEED, technique="tensor"),
    "pp-deepspeed": Run(PP, "deepspeed", "train_deepspeed_pipeline.py", "deepspeed", environment=DEEPSPEED),
}


def run(words: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a process prints.

    Raises:
        RuntimeError: with the end of what it said, if it fails.
    """
    # Extensions of torch are built here: a lock that an ended run left in the user's folder stops DeepSpeed for ever.
    own = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    env = {"OMP_NUM_THREADS": "1", **os.environ, **own, **(environment or {})}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60 * MINUTES
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def losses_of(printed: str) -> tuple[list[float], str]:
    """What a training script reported."""
    (line,) = [line for line in printed.splitlines() if line.startswith('{"losses"')]
    found = json.loads(line)
    return found["losses"], found["how"]


def launch(name: str, folder: Path) -> tuple[list[float], str]:
    """Losses of a run, and what the engine says that it did."""
    from tiny import ARCH, CLUSTER, ROWS

    one = RUNS[name]
    (folder / "cluster.yaml").write_text(CLUSTER)
    plan = [*one.plan]
    if one.technique:
        (folder / "pins.yaml").write_text(f"techniques: {{a: {one.technique}}}\n")
        plan += ["--mesh", "a=2", "--pins", "pins.yaml"]
    package = f"plan_{name.replace('-', '_')}"
    common = ["--batch", str(ROWS), "--dtype", "float32", "--cluster", "cluster.yaml", "--rules", "none", "--no-cache"]
    run(["-P", "-m", "pdv", "optimize", "--arch", ARCH, *common, *plan, "-o", package], folder)
    file = f"{name}.exported"
    told = json.loads(run(["-P", "-m", "pdv", "export", package, "--to", one.engine, "-o", file, "--json"], folder))
    assert not told["lost"], told["lost"]
    start = [word.format(file=file) for word in one.start]
    words = [*start, str(HERE / one.script), *([] if "{file}" in one.start else [file])]
    return losses_of(run(words, folder, one.environment))


def main() -> None:
    """Run them, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        expected, _ = losses_of(run([str(HERE / "tiny.py")], folder))
        print(f"{'one process':<20} {', '.join(f'{loss:.6f}' for loss in expected)}", flush=True)
        for name in options.only:
            if find_spec(RUNS[name].needs) is None:
                print(f"{name:<20} left out: {RUNS[name].needs} is not installed", flush=True)
                continue
            losses, how = launch(name, folder)
            apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            verdict = "equal" if apart <= CLOSE else "DIFFERS"
            print(f"{name:<20} {verdict} within {apart:.1e}; {how}", flush=True)
            if apart > CLOSE:
                sys.exit(1)


if __name__ == "__main__":
    main()
