"""What a training step costs beside its kernels: AdamW and the handling of each parameter, on one process.

    python benchmarks/host_costs.py [--smoke] [--json OUT]

An emitted program keeps parameters as DTensors, reads them through leaves, and steps on local tensors. Timed per
parameter of n float32 elements, as the templates do it: *once a step*, fused AdamW and giving it its gradient;
*with each micro-batch*, taking the leaf. Least squares over relative errors gives seconds per parameter and per byte.
Timed beside it with layers one after the other, each with weights of its own: against one layer again and again, as
profiles have it (weights that are not in the caches, gradients in memory that was not touched); and with gradients
that are added to those of an earlier micro-batch. These are the numbers of ``learned_cost/devices/host.py``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.record import Record, arguments, table

SIZES = tuple(4**power * 256 for power in range(8))  # elements: 1 KiB to 16 MiB
BYTES = 4  # of float32
CLOCK_S = 1e-7  # what differences of clocks tell


def main() -> None:
    """Time, fit, print."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    record = Record()
    _start()
    for size in SIZES[:2] if options.smoke else SIZES:
        count = max(2, min(40, 2**22 // size))
        record.rows.append({"bytes": size * BYTES, **timed(size, count, 3 if options.smoke else 15)})
    for name in ("step_s", "visit_s"):
        constant, slope = fitted([row["bytes"] for row in record.rows], [row[name] for row in record.rows])
        record.claim(f"{name}: a parameter", constant * 1e6, "us")
        record.claim(f"{name}: a GB", slope * 1e9, "s")
    touched, added = by_layer(3 if options.smoke else 15)
    record.claim("first touch of a weight and its gradient: a GB", touched * 1e9, "s")
    record.claim("adding to an earlier gradient: a GB", added * 1e9, "s")
    table(
        ("bytes", "once a step us", "each micro-batch us"),
        [(str(r["bytes"]), f"{r['step_s'] * 1e6:.1f}", f"{r['visit_s'] * 1e6:.1f}") for r in record.rows],
    )
    record.print_summary()
    record.write(options.json)


def _start() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    dist.init_process_group("gloo")


def timed(size: int, count: int, repeats: int) -> dict[str, float]:
    """Seconds per parameter of ``size`` elements, of ``count`` alike: once a step, and with each micro-batch."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    from pdv.emit.templates.gradients import GradientSums, Leaves, local
    from pdv.emit.templates.optimizers import step_on_local_tensors

    mesh = init_device_mesh("cpu", (1,))
    sums = GradientSums(mesh)
    whole = [torch.randn(size) for _ in range(count)]
    parameters = [nn.Parameter(DTensor.from_local(x, mesh, [Replicate()])) for x in whole]
    for parameter in parameters:
        parameter.leaves = Leaves(sums, {})  # type: ignore[attr-defined]
    plain = [x.clone().requires_grad_() for x in whole]
    step_on_local_tensors()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def held() -> None:
        sums.drop()
        with sums.hold():
            _through([local(x) for x in parameters])

    def alone() -> None:
        for x in plain:
            x.grad = None
        _through(plain)

    visit = lower(held, repeats) - lower(alone, repeats)
    given = lower(sums.flush, 1, before=held)
    step = lower(optimizer.step, repeats)
    zero = lower(optimizer.zero_grad, 1)
    return {"step_s": (given + step + zero) / count, "visit_s": max(visit / count, CLOCK_S)}


def by_layer(repeats: int) -> tuple[float, float]:
    """Seconds a byte that layers with weights of their own take more than one that is run again and again; and that
    gradients take more which are added to earlier ones.
    """
    import torch
    from torch.nn.functional import linear

    rows, width, count = 64, 1024, 12
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(count)]
    x, seed = torch.randn(rows, width, requires_grad=True), torch.ones(rows, width)

    def layers(chosen: Sequence[Any]) -> None:
        for weight in chosen:
            linear(x, weight).backward(seed)

    def anew() -> None:
        for weight in weights:
            weight.grad = None

    apart = lower(lambda: layers(weights), repeats, before=anew)
    added = lower(lambda: layers(weights), repeats)

    def again() -> None:
        for _ in range(count):
            weights[0].grad = None
            layers(weights[:1])

    size = count * width * width * BYTES
    return max(apart - lower(again, repeats), 0.0) / size, max(added - apart, 0.0) / size


def _through(values: list[Any]) -> None:
    import torch

    torch.autograd.backward([x.sum() for x in values])


def lower(run: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Lower quartile of the seconds of a call, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        before()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    kept = times[2:]
    return statistics.quantiles(kept, n=4, method="inclusive")[0] if len(kept) > 1 else kept[0]


def fitted(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """(seconds at no bytes, seconds a byte) by least squares of relative errors, neither below zero."""
    x, y = np.array(sizes, dtype=float), np.array(seconds)
    constant, slope = np.linalg.lstsq(np.stack([np.ones_like(x), x], 1) / y[:, None], np.ones_like(y))[0]
    return max(float(constant), 0.0), max(float(slope), 0.0)


if __name__ == "__main__":
    main()
