"""Time of single kernels, forward and backward, beside the roofline's prediction for the device at hand.

    python benchmarks/kernels.py [--smoke] [--json OUT | --folder DIR] [--budget SECONDS]

Library kernels run over the local shapes of GPT-2, Llama and ResNet plans; two Triton kernels of ours run beside the
library's. Operands rotate through more memory than the cache holds, for in a training step they come from memory.
TF32 is off, as the presets' float32 rates have it.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

from benchmarks.devices import default_device, label, preset
from benchmarks.kernel_cases import Case, cases
from benchmarks.record import Record, arguments, table
from benchmarks.timing import Timing, measure
from ir.operator import Attrs, Work
from ir.types import DType, TensorType
from pdv.cost.compute import ComputeModel

# The largest last-level cache of the CPUs in question, roughly; a GPU tells its own.
CPU_CACHE_BYTES = 32 << 20
MAX_COPIES = 16

CALLS: dict[str, Callable[[Sequence[Tensor], Attrs], Tensor]] = {
    "linear": lambda x, a: F.linear(x[0], x[1]),
    "matmul": lambda x, a: torch.matmul(x[0], x[1]),
    "attention": lambda x, a: F.scaled_dot_product_attention(
        x[0], x[1], x[2], is_causal=bool(a["causal"]), scale=_float(a["scale"])
    ),
    "layer_norm": lambda x, a: F.layer_norm(x[0], x[1].shape, x[1], x[2], _float(a["eps"])),
    "rms_norm": lambda x, a: F.rms_norm(x[0], x[1].shape, x[1], _float(a["eps"])),
    "softmax": lambda x, a: F.softmax(x[0], dim=-1),
    "gelu": lambda x, a: F.gelu(x[0], approximate=str(a["approximate"])),
    "silu": lambda x, a: F.silu(x[0]),
    "add": lambda x, a: x[0] + x[1],
    "embedding": lambda x, a: F.embedding(x[1], x[0]),
    "conv2d": lambda x, a: torch.ops.aten.convolution.default(
        x[0], x[1], None, a["stride"], a["padding"], a["dilation"], False, [0, 0], a["groups"]
    ),
}


def main() -> None:
    """Time every case within the budget; print the medians of each operator."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--budget", type=float, default=150.0, help="seconds after which no case is begun")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="also write the record to DIR/kernels-<device>.json")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    device = default_device()
    record = Record()
    record.rows += triton_rows(device, small=options.smoke)
    todo = cases((DType.F32, DType.BF16), small=options.smoke)
    done = 0
    for case in todo:
        if time.monotonic() > deadline:
            break
        record.rows += time_case(case, device)
        done += 1
    show(record)
    summarize(record, done, len(todo))
    record.print_summary()
    record.write(options.json)
    if options.folder is not None:
        record.write(options.folder / f"kernels-{label(device)}.json")


def time_case(case: Case, device: torch.device) -> list[dict[str, Any]]:
    """One row for forward and one for backward; one that says so where the device's memory does not hold it."""
    try:
        copies = [_operands(case, device) for _ in range(_num_copies(case.types, device))]
        call, attrs = CALLS[case.node.op.name], case.node.attrs
        forward = _in_turn(lambda x: call(x, attrs), copies)
        with torch.no_grad():
            rows = [_row(case, "forward", measure(forward, device), case.forward, device)]
        backward = _in_turn(_gradients, [(x, call(x, attrs)) for x in copies])
        return [*rows, _row(case, "backward", measure(backward, device), case.backward, device)]
    except torch.OutOfMemoryError:
        return [_names(case, "forward", device) | {"error": "out of memory"}]


def _gradients(built: tuple[Sequence[Tensor], Tensor]) -> object:
    """Backward of one call, whose graph is kept; the result serves as its own incoming gradient."""
    operands, result = built
    wanted = [operand for operand in operands if operand.requires_grad]
    return torch.autograd.grad(result, wanted, result.detach(), retain_graph=True)


def _in_turn(run: Callable[[Any], object], copies: Sequence[Any]) -> Callable[[], object]:
    """A call that goes through ``copies`` one after the other."""
    turn = itertools.cycle(copies)
    return lambda: run(next(turn))


def _operands(case: Case, device: torch.device) -> list[Tensor]:
    """Random operands: ids below the table's length, everything else normal."""
    made = []
    for tensor, wanted in zip(case.types, case.wanted, strict=True):
        if tensor.dtype.is_floating:
            made.append(_normal(tensor, device).requires_grad_(wanted))
        else:
            made.append(torch.randint(case.types[0].shape[0], tensor.shape, device=device))
    return made


def _normal(tensor: TensorType, device: torch.device) -> Tensor:
    return torch.randn(tensor.shape, device=device, dtype=getattr(torch, tensor.dtype.torch_name))


def _num_copies(types: Sequence[TensorType], device: torch.device) -> int:
    """So many that they fill the cache twice."""
    gpu = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if gpu else CPU_CACHE_BYTES
    return min(MAX_COPIES, math.ceil(2 * cache / sum(tensor.num_bytes for tensor in types)))


# ---- Our own kernels ----


def triton_rows(device: torch.device, *, small: bool) -> Iterator[dict[str, Any]]:
    """Our kernels and the library's for the same, checked against each other, then timed; none without GPU or Triton.

    The library does bias and gelu in two kernels.
    """
    if device.type != "cuda" or util.find_spec("triton") is None:
        print(f"Triton kernels skipped: {'no GPU' if device.type != 'cuda' else 'Triton is not installed'}")
        return
    from benchmarks import triton_kernels as ours

    shapes = {"bias_gelu": (8, 1024, 3072), "rms_norm": (1, 2048, 4096)}
    sides: dict[str, tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]] = {
        "bias_gelu": (lambda x: ours.bias_gelu(x[0], x[1]), lambda x: F.gelu(x[0] + x[1], approximate="tanh")),
        "rms_norm": (lambda x: ours.rms_norm(x[0], x[1], 1e-5), lambda x: F.rms_norm(x[0], x[1].shape, x[1], 1e-5)),
    }
    for name, dtype in itertools.product(sides, (DType.F32, DType.BF16)):
        shape = (2, 8, 64) if small else shapes[name]
        types = (TensorType(shape, dtype), TensorType(shape[-1:], dtype))
        copies = [[_normal(t, device) for t in types] for _ in range(_num_copies(types, device))]
        kernel, library = sides[name]
        tolerance = 1e-5 if dtype is DType.F32 else 2e-2  # bfloat16 keeps 8 bits; the library rounds in between
        torch.testing.assert_close(kernel(copies[0]), library(copies[0]), rtol=tolerance, atol=tolerance)
        moved = 2 * types[0].num_bytes + types[1].num_bytes
        work = Work(10.0 * types[0].num_elements, moved, 1)  # far below what arithmetic could bound
        for side, run in (("triton", kernel), ("library", library)):
            timing = measure(_in_turn(run, copies), device)
            names = {"op": f"{side}:{name}", "model": "-", "degree": 1, "loop": "none", "direction": "forward"}
            yield names | _figures(types, dtype, timing, work, device)


# ---- Rows and their summary ----


def _row(case: Case, direction: str, timing: Timing, work: Work, device: torch.device) -> dict[str, Any]:
    return _names(case, direction, device) | _figures(case.types, case.dtype, timing, work, device)


def _names(case: Case, direction: str, device: torch.device) -> dict[str, Any]:
    return {
        "op": case.node.op.name,
        "model": case.model,
        "degree": case.degree,
        "loop": case.loop,
        "direction": direction,
        "attrs": dict(case.node.attrs),
        "device": label(device),
        "shapes": [str(tensor) for tensor in case.types],
    }


def _figures(
    types: Sequence[TensorType], dtype: DType, timing: Timing, work: Work, device: torch.device
) -> dict[str, Any]:
    known = preset(device)
    predicted = ComputeModel((known,)).seconds(work, dtype) if known else None
    return {
        "device": label(device),
        "shapes": [str(tensor) for tensor in types],
        "dtype": dtype.torch_name,
        "flops": work.flops,
        "bytes_moved": work.bytes_moved,
        "time_s": timing.median_s,
        "quartiles_s": [timing.low_s, timing.high_s],
        "samples": timing.samples,
        "predicted_s": predicted,
        "measured_over_predicted": timing.median_s / predicted if predicted else None,
    }


def _groups(record: Record) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Timed rows by operator, dtype and direction."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in record.rows:
        if "time_s" in row:
            groups.setdefault((row["op"], row["dtype"], row["direction"]), []).append(row)
    return groups


def show(record: Record) -> None:
    """A line per operator, dtype and direction: rates reached at best, and measured over predicted with its range."""
    lines: list[tuple[str, ...]] = []
    for key, rows in _groups(record).items():
        rate = max(row["flops"] / row["time_s"] for row in rows) * 1e-12
        speed = max(row["bytes_moved"] / row["time_s"] for row in rows) * 1e-9
        spread = statistics.median((row["quartiles_s"][1] - row["quartiles_s"][0]) / row["time_s"] for row in rows)
        ratios = [row["measured_over_predicted"] for row in rows if row["measured_over_predicted"]]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "no preset"
        lines.append((*key, str(len(rows)), f"{rate:.2f}", f"{speed:.0f}", ratio, f"{spread:.0%}"))
    header = ("operator", "dtype", "direction", "cases", "best TFLOP/s", "best GB/s", "measured / predicted", "spread")
    table(header, lines)


def summarize(record: Record, done: int, total: int) -> None:
    """Claim what was covered, how far the roofline was off, and what our kernels gain."""
    record.claim("cases timed", done, f"of {total}")
    ratios = [row["measured_over_predicted"] for row in record.rows if row.get("measured_over_predicted")]
    if ratios:
        # The median: backward of `add` hands its gradient on and runs nothing, which makes any error of it infinite.
        errors = [abs(1 / ratio - 1) for ratio in ratios]
        low, middle, high = statistics.quantiles(ratios, n=4)
        record.claim("measured over predicted, median", middle, "x", f"(quartiles {low:.2f}-{high:.2f})")
        record.claim("roofline, median absolute relative error", statistics.median(errors), "")
    times = {key: rows[0]["time_s"] for key, rows in _groups(record).items() if len(rows) == 1}
    for (op, dtype, direction), seconds in times.items():
        if op.startswith("triton:"):
            library = times[op.replace("triton:", "library:"), dtype, direction]
            record.claim(f"{op} over the library, {dtype}", seconds / library, "x", "(below 1 is faster)")


def _float(value: object) -> float:
    assert isinstance(value, float), value
    return value


if __name__ == "__main__":
    main()
