"""Emitted programs against the modules they came from: forward, gradients and 20 steps of AdamW, at full size.

    python benchmarks/parity.py [--smoke] [--json OUT] [--models gpt2,bert] [--size full] [--steps 20]

Each model goes through both frontends, and on each mesh runs a plan that mixes techniques, forced by pins
(benchmarks/models/techniques.py), on CPU processes with gloo. Differences are relative, in float32.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from benchmarks.models.techniques import TP_SP, ZERO2, ZERO4, ZERO_TP, ZERO_TP_8, Technique, forced_plan
from benchmarks.record import Record, arguments, environment, table

TECHNIQUES = {"2": TP_SP, "4": ZERO4, "2x2": ZERO_TP, "2x4": ZERO_TP_8}
# 197 tokens are odd, and images have no sequence: no sequence to cut
WITHOUT_SEQUENCE = {"vit": {"2": ZERO2}, "resnet50": {"2": ZERO2}}
MODELS = ("gpt2", "llama", "bert", "vit", "resnet50")


def main() -> None:
    """Run every case; print the differences."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--meshes", default=",".join(TECHNIQUES), help="comma-separated")
    parser.add_argument("--frontends", default="export,onnx", help="comma-separated")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", type=Path, help="observe the package in this folder (what torchrun starts)")
    options = parser.parse_args()
    if options.worker:
        observe_here(options.worker)
        return
    if options.smoke:
        options.models, options.meshes, options.frontends, options.size = "gpt2", "2", "export", "small"
    record = Record()
    for name in options.models.split(","):
        run_model(record, name, options.size, options.steps, options.meshes.split(","), options.frontends.split(","))
    show(record)
    for key in ("forward", "gradient", "loss"):
        record.claim(f"largest relative difference, {key}", max(row[key] for row in record.rows), "")
    record.print_summary()
    record.write(options.json)


def show(record: Record) -> None:
    """The rows as a table."""
    rows: list[tuple[str, ...]] = []
    for row in record.rows:
        differences = [f"{row[key]:.1e}" for key in ("forward", "gradient", "loss")]
        rows.append((row["case"], *differences, str(row["lines"]), f"{row['wall_s']:.0f}"))
    table(("case", "forward", "gradient", "loss", "lines of model.py", "wall s"), rows)


def run_model(record: Record, name: str, size: Any, steps: int, meshes: list[str], frontends: list[str]) -> None:
    """All cases of one model against one reference run."""
    from benchmarks.measured.parity import Frontend, load_model, reference

    expected = reference(name, size, steps=steps)
    for frontend in (one for one in get_args(Frontend) if one in frontends):
        with tempfile.TemporaryDirectory() as scratch:
            program = load_model(name, frontend, Path(scratch), size)
            for mesh in meshes:
                technique = WITHOUT_SEQUENCE.get(name, {}).get(mesh, TECHNIQUES[mesh])
                row = run_case(program, technique, expected, Path(scratch))
                record.rows.append({"case": f"{name} {size}, {frontend}, {technique.name}", **row})
                print(f"{record.rows[-1]}", file=sys.stderr)
        gc.collect()


def run_case(program: Any, technique: Technique, expected: Any, scratch: Path) -> dict[str, float]:
    """Emit one plan, train it under torchrun, compare its first rank's view with the reference."""
    import torch

    from benchmarks.measured.parity import compare
    from pdv.emit.package import emit_package

    started = time.monotonic()
    folder = scratch / technique.name.replace("+", "_").replace("-", "_")
    package = folder / "emitted_pdv"
    package.mkdir(parents=True)
    emit_package(forced_plan(program.graph, technique), technique.mesh, {}, program.weights, package)
    torch.save((expected.batches, expected.targets), folder / "data.pt")
    processes = technique.mesh.num_devices
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__, "--worker"]
    variables = environment(GLOO_SOCKET_IFNAME="lo")
    subprocess.run([sys.executable, *command, str(folder)], check=True, env=variables)
    found = compare(expected.observed, torch.load(folder / "observed.pt", weights_only=False))  # our own file
    lines = len((package / "model.py").read_text().splitlines())
    for path in (folder / "data.pt", folder / "observed.pt", package / "weights.safetensors"):
        path.unlink()
    return {
        "forward": found.forward, "gradient": found.gradient, "loss": found.loss, "lines": lines,
        "wall_s": time.monotonic() - started,
    }  # fmt: skip


def observe_here(folder: Path) -> None:
    """One rank's part: observe, and leave what the first rank saw."""
    import torch

    from benchmarks.measured.parity import observe_package

    batches, targets = torch.load(folder / "data.pt", weights_only=True)
    observed = observe_package(folder / "emitted_pdv", batches, targets)
    if torch.distributed.get_rank() == 0:
        torch.save(observed, folder / "observed.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
