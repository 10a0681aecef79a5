"""Interpreters that end while threads still hold collectives: these are waited for, and not for long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdv.emit.templates.kernels.exits import mark_collectives, wait_for
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed


def waits(held_s: float, longest_s: float) -> tuple[bool, float]:
    """For a collective of a backward pass that a thread holds so long: whether it is dropped, and after how long."""
    mark, held = mark_collectives(), [dist.all_reduce(torch.ones(3), async_op=True)]
    parameter = torch.ones(3, requires_grad=True)
    parameter.register_hook(lambda grad: held.append(dist.all_reduce(grad.clone(), async_op=True)))
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert all(work.wait() for work in held)
    threading.Timer(held_s, held.clear).start()
    begin = time.monotonic()
    wait_for(mark, longest_s)
    return not held, time.monotonic() - begin


@pytest.mark.parametrize(("held_s", "longest_s", "dropped"), [(0.3, 60, True), (20, 0.3, False)])
def test_what_threads_hold_is_waited_for_a_while(held_s: float, longest_s: float, dropped: bool) -> None:
    for found, seconds in run_ranks(waits, 2, held_s, longest_s):
        assert found is dropped
        assert 0.25 < seconds < 15


AT_ONCE = """
import sys, torch, torch.distributed as dist
from pdv.emit.templates.kernels.exits import wait_at_exit
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
wait_at_exit()
sys.setswitchinterval(1e4)  # threads that wait for the lock get it only from who sleeps
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(3):
    model(torch.ones(4, 64)).sum().backward()
dist.destroy_process_group()
"""


def test_processes_that_end_behind_a_backward_pass_do_not_abort(tmp_path: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=150) for rank in ranks] == [0] * 2


STARTED_AGAIN = """
import os, torch, torch.distributed as dist
from pdv.emit.templates.kernels.launched import join
join("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.abort()
if dist.get_rank() == 0:
    print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], "sum", int(total), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_processes_that_torchrun_starts_again_find_each_other(tmp_path: Path) -> None:
    """At the first try: the store that torchrun keeps has the addresses of those that ended, too."""
    (script := tmp_path / "script.py").write_text(STARTED_AGAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "start 1 sum 3"), done.stderr[-2000:]
