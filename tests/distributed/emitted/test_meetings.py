"""Functions that all ranks call, called by some: an error that names both, and no wait without an end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdv.emit.templates.calls import check_divisible
from pdv.emit.templates.kernels import meetings
from pdv.emit.templates.parallel import Axis
from tests.distributed.emitted.test_loop import batch, classifier, pair, write_weights
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed


def apart(path: Path) -> int:
    model, rank = classifier(path, {"dp": 2, "tp": 1}), dist.get_rank()
    model.train_step(*batch(), pair)
    meetings.PATIENCE_S = 0.5
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"ranks-apart: rank 0 is in full_state_dict; rank 1 did not come in"):
            model.full_state_dict()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"ranks-apart: rank 0 is in full_state_dict, where it waits no longer"):
            model.check_in_sync()
    meetings.PATIENCE_S, begun = 30.0, time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"rank 0 is in check_in_sync; rank 1 is in train_step .number 2 of training"
    ):
        model.check_in_sync() if rank == 0 else model.train_step(*batch(), pair)
    assert time.monotonic() - begun < 10
    model.check_in_sync()
    return len(model.full_state_dict())


def test_ranks_that_are_elsewhere(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights")
    assert run_ranks(apart, 2, tmp_path / "weights") == [5, 5]


def test_rows_that_do_not_divide() -> None:
    """Over micro-batches and ranks at once: a stage that has no rows to cut knows it, too."""
    axes = [Axis("dp", size=2), Axis("tp")]
    check_divisible([torch.zeros(8), torch.zeros(())], axes, 2)
    for rows, said in ((2, "uneven-cut: 2 rows"), (3, "uneven-micro-batches: 3 rows")):
        with pytest.raises(ValueError, match=rf"{said} in 2 micro-batches x dp 2. .* a multiple of 4 = 2 micro"):
            check_divisible([torch.zeros(rows)], axes, 2)


STOPS_EARLY = """
from types import SimpleNamespace
import torch.distributed as dist
from pdv.emit.templates.kernels.meetings import meet
dist.init_process_group("gloo")
for step in range(2 if dist.get_rank() == 1 else 4):
    meet(SimpleNamespace(mesh=SimpleNamespace(ranks=True)), f"train_step (number {step})")
dist.destroy_process_group()
"""


def test_nobody_waits_for_a_rank_whose_program_has_ended(tmp_path: Path) -> None:
    """As one that stops early, by itself, under torchrun."""
    said = "ranks-apart: ranks 0, 2 are in train_step (number 2); rank 1 is at the end of the program. Every rank has"
    assert said in errors_of(STOPS_EARLY, tmp_path)


STOPS_BETWEEN_MEETINGS = """
from types import SimpleNamespace
import torch
import torch.distributed as dist
from pdv.emit.templates.kernels.meetings import meet
dist.init_process_group("gloo")
meet(SimpleNamespace(mesh=SimpleNamespace(ranks=True)), "train_step")
for step in range(2 if dist.get_rank() == 1 else 4):
    dist.all_reduce(torch.ones(8))
if dist.get_rank() == 1:  # in peace: torch aborts some that still hold a group, and torchrun then ends the others, too
    dist.destroy_process_group()
"""


def test_a_collective_that_fails_says_whose_program_has_ended(tmp_path: Path) -> None:
    """Torch says that a connection is closed, and tells a joke."""
    errors = errors_of(STOPS_BETWEEN_MEETINGS, tmp_path)
    assert "ranks-apart: the program of rank 1 has ended, in the middle" in errors
    assert "by a number that all have, such as the loss that train_step returns" in errors


def errors_of(text: str, path: Path) -> str:
    """What a program that ends in an error writes, as one on three ranks under torchrun."""
    script = path / "stops_early.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(script)]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    return done.stderr
