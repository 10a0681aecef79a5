"""What a training step costs beside its kernels: AdamW and the handling of each parameter, on one process.

    python benchmarks/host_costs.py [--smoke] [--json OUT]

An emitted program keeps parameters as DTensors. Timed per parameter of n float32 elements: the step of AdamW; and
taking the local piece in forward with the accumulation of its gradient. Least squares over relative errors gives
seconds per parameter and per byte. Timed beside it: linear layers one after the other, each with weights of its own,
against one layer again and again, as profiles have it (weights that are not in the caches, gradients in memory that was
not touched). These are the numbers of ``learned_cost/devices/host.py``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import Record, arguments, table

SIZES = tuple(4**power * 256 for power in range(8))  # elements: 1 KiB to 16 MiB
BYTES = 4  # of float32


def main() -> None:
    """Time, fit, print."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    record = Record()
    _start()
    for size in SIZES[:2] if options.smoke else SIZES:
        count = max(2, min(40, 2**22 // size))
        record.rows.append({"bytes": size * BYTES, **timed(size, count, 3 if options.smoke else 15)})
    for name in ("optimizer_s", "handling_s"):
        constant, slope = fitted([row["bytes"] for row in record.rows], [row[name] for row in record.rows])
        record.claim(f"{name}: a parameter", constant * 1e6, "us")
        record.claim(f"{name}: a GB", slope * 1e9, "s")
    repeats = 3 if options.smoke else 15
    record.claim("first touch of a weight and its gradient: a GB", first_touch(repeats) * 1e9, "s")
    table(
        ("bytes", "AdamW us", "handling us"),
        [(str(r["bytes"]), f"{r['optimizer_s'] * 1e6:.1f}", f"{r['handling_s'] * 1e6:.1f}") for r in record.rows],
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
    """Seconds per parameter of ``size`` elements, of ``count`` alike."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (1,))
    whole = [torch.randn(size) for _ in range(count)]
    parameters = [nn.Parameter(DTensor.from_local(x, mesh, [Replicate()])) for x in whole]
    plain = [x.clone().requires_grad_() for x in whole]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def local(x: Any) -> Any:
        return x.to_local(grad_placements=x.placements)

    handled = lower(lambda: _through([local(x) for x in parameters]), repeats)
    alone = lower(lambda: _through(plain), repeats)
    step = lower(optimizer.step, repeats)
    zero = lower(optimizer.zero_grad, 1)
    return {"optimizer_s": (step + zero) / count, "handling_s": max(handled - alone, 0.0) / count}


def first_touch(repeats: int) -> float:
    """Seconds a byte that a layer with weights of its own takes more than one that is run again and again."""
    import torch
    from torch.nn.functional import linear

    rows, width, count = 64, 1024, 12
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(count)]
    x, seed = torch.randn(rows, width, requires_grad=True), torch.ones(rows, width)

    def layers(chosen: list[Any]) -> list[Any]:
        return [torch.autograd.grad(linear(x, weight), [x, weight], seed) for weight in chosen]

    apart = lower(lambda: layers(weights), repeats)
    again = lower(lambda: [layers(weights[:1]) for _ in range(count)], repeats)
    return max(apart - again, 0.0) / (count * width * width * BYTES)


def _through(values: list[Any]) -> None:
    import torch

    torch.autograd.backward([x.sum() for x in values])


def lower(run: Callable[[], object], repeats: int) -> float:
    """Lower quartile of the seconds of a call, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
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
