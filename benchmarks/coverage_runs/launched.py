"""A plan's package run by torchrun, on four processes with gloo, against the module: loss and gradients of a step.

    torchrun --nproc-per-node=4 benchmarks/coverage_runs/launched.py FOLDER

Both without dropout. Entry point: ``run``; as a script it is what each process does.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.record import environment
from pdv.check.module_run import Undropped
from pdv.frontend.torch.draws import say_drop_paths
from pdv.plan.package import Plan, import_package

PROCESSES, TOLERANCE = 4, 1e-3  # of the largest gradient, in float32


def run(plan: Plan, module: torch.nn.Module, inputs: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """How far loss and gradients are off: of the loss, and of the largest gradient.

    Raises:
        RuntimeError: with the end of what was printed, if a process failed.
    """
    plan.save(folder / "package")
    named = [inputs[node.attr("name")] for node in plan.source.inputs]
    module = copy.deepcopy(module)
    say_drop_paths(module)
    with Undropped():
        loss = tree_leaves(module(**inputs))[0]
        loss.backward()
    others = plan.document.get("state", {}).get("names", {})  # of a tied weight the program has one name
    found = {others.get(name, [name])[0]: p.grad for name, p in module.named_parameters()}
    wanted = {name: gradient for name, gradient in found.items() if gradient is not None}
    torch.save({"inputs": named, "loss": loss.detach(), "gradients": wanted}, folder / "given.pt")
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}", __file__, str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError((errors or [done.stderr[-600:]])[0])
    gaps: dict[str, float] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return gaps


def main(folder: Path) -> None:
    """One process."""
    given = torch.load(folder / "given.pt")
    model = import_package(folder / "package").build(device="cpu")
    model.eval()
    loss = tree_leaves(model(*given["inputs"]))[0]
    loss.backward()
    gradients, wanted = model.full_gradients(), given["gradients"]
    largest = max(float(x.abs().max()) for x in wanted.values())
    gaps = [float((gradients[name] - x).abs().max()) / largest for name, x in wanted.items()]
    worst = torch.tensor([abs(float(loss) / float(given["loss"]) - 1), max(gaps)])
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    if torch.distributed.get_rank() == 0:
        found = {"loss": float(worst[0]), "gradients": float(worst[1])}
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
