"""The emitted program at degree one against the module it came from, eager: same outputs, and how their times compare.

    python benchmarks/single_device.py [--smoke] [--json OUT] [--compile]

GPT-2 is planned for one device, saved, built there. A pass is forward, loss and backward. The two sides alternate in
one run and each pair gives a ratio; TF32 is off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import pdv
from benchmarks.devices import default_device, label, one_device
from benchmarks.models import Size, build, token_ids
from benchmarks.record import Record, arguments, table
from benchmarks.timing import sample, summary
from pdv.plan import import_package

PAIRS = 15
# Largest difference over the largest element, of the output and of each gradient: float32 as for plans on a mesh,
# bfloat16 twelve layers deep at 8 bits. A gradient below SCALE_FLOOR of the largest of all is rounding: an attention
# key's bias has none.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
SCALE_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """GPT-2 in one size."""

    size: Size
    batch: int
    sequence: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"gpt2 {self.size}, {self.batch} x {self.sequence}, {str(self.dtype).removeprefix('torch.')}"


def cases_on(device: torch.device, *, smoke: bool) -> list[Case]:
    """Host-bound and device-bound sizes on a GPU; on a CPU what it can bear."""
    small = Case("small", 8, 16, torch.float32)
    if smoke:
        return [small]
    if device.type == "cpu":
        return [small, Case("full", 2, 64, torch.float32)]
    sizes: list[tuple[Size, int, int]] = [("small", 8, 16), ("full", 8, 64), ("full", 8, 1024)]
    return [Case(*size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]


def main() -> None:
    """Compare and time each case; fail if any differs by more than rounding."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="run both sides under torch.compile")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    device = default_device()
    record = Record()
    for case in cases_on(device, smoke=options.smoke):
        row = compare(case, device, compiled=options.compile, pairs=3 if options.smoke else PAIRS)
        record.rows.append(row)
        low, high = row["ratio_quartiles"]
        record.claim(f"emitted over source, {case.name}", row["ratio"], "x", f"(quartiles {low:.3f}-{high:.3f})")
    show(record)
    record.write(options.json)
    wrong = [row["case"] for row in record.rows if row["difference"] > row["tolerance"]]
    assert not wrong, f"emitted and source differ: {wrong}"


def compare(case: Case, device: torch.device, *, compiled: bool, pairs: int) -> dict[str, Any]:
    """Both sides of one case: how far apart their outputs and gradients are, and their times."""
    source, emitted, ids = both(case, device)
    target = ids.roll(-1, 1)
    emitted_pass, source_pass = (one_pass(side, ids, target, compiled=compiled) for side in (emitted, source))
    found, expected = emitted_pass(), source_pass()
    difference = max(apart(found, expected), gradients_apart(emitted, source))
    times = timed_in_turn(emitted_pass, source_pass, device, pairs)
    ratios = summary([ours / theirs for ours, theirs in times])
    row: dict[str, Any] = {
        "case": case.name,
        "device": label(device),
        "compiled": compiled,
        "difference": difference,
        "tolerance": TOLERANCE[case.dtype],
        "emitted_s": summary([ours for ours, _ in times]).median_s,
        "source_s": summary([theirs for _, theirs in times]).median_s,
        "ratio": ratios.median_s,
        "ratio_quartiles": [ratios.low_s, ratios.high_s],
        "pairs": pairs,
    }
    if device.type == "cuda":
        row |= {
            f"{name}_peak_bytes": peak(run, device)
            for name, run in (("emitted", emitted_pass), ("source", source_pass))
        }
    return row


def both(case: Case, device: torch.device) -> tuple[nn.Module, nn.Module, Tensor]:
    """The source module, the emitted one, both on the device, and a batch of ids."""
    module, _ = build("gpt2", case.size)
    (ids,) = token_ids(module.get_parameter("transformer.wte.weight").size(0), case.batch, case.sequence)
    plan = pdv.optimize(module, (ids,), cluster=one_device(device))
    with tempfile.TemporaryDirectory() as scratch:
        package = plan.save(Path(scratch) / "gpt2_pdv")
        emitted = import_package(package).build(device=device, dtype=case.dtype)
    return module.to(device, case.dtype), emitted, ids.to(device)


def one_pass(module: nn.Module, ids: Tensor, target: Tensor, *, compiled: bool) -> Callable[[], Tensor]:
    """Forward, loss and backward into fresh gradients; gives the logits."""
    run = torch.compile(module) if compiled else module

    def step() -> Tensor:
        module.zero_grad(set_to_none=True)
        logits: Tensor = run(ids)
        torch.autograd.backward(F.cross_entropy(logits.float().flatten(0, 1), target.flatten()))
        return logits.detach()

    return step


def timed_in_turn(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device, pairs: int
) -> list[tuple[float, float]]:
    """Seconds of each side in ``pairs`` alternations, which begin in turn with either, after a warm-up."""
    calls = max(1, min(20, int(0.05 / max(sample(run, device, 2) for run in (ours, theirs)))))
    times = []
    for index in range(pairs):
        if index % 2:
            second, first = sample(theirs, device, calls), sample(ours, device, calls)
        else:
            first, second = sample(ours, device, calls), sample(theirs, device, calls)
        times.append((first, second))
    return times


def apart(found: Tensor, expected: Tensor, scale: float = 1e-30) -> float:
    """Largest difference over the largest element, or over ``scale`` if that is larger."""
    largest = max(expected.abs().max().item(), scale)
    return (found.float() - expected.float()).abs().max().item() / largest


def gradients_apart(emitted: Any, source: nn.Module) -> float:  # Any: a module of a package made at run time
    """The largest difference of any gradient; every parameter of the source has one."""
    found: dict[str, Tensor] = emitted.full_gradients()
    expected = {name: p.grad for name, p in source.named_parameters(remove_duplicate=False) if p.grad is not None}
    scale = SCALE_FLOOR * max(gradient.abs().max().item() for gradient in expected.values())
    covered = {id(expected[name]) for name in found}
    assert covered == {id(gradient) for gradient in expected.values()}, "a parameter has no gradient"
    return max(apart(found[name], expected[name], scale) for name in found)


def peak(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that one pass adds to what the device holds between passes."""
    run()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def show(record: Record) -> None:
    """A line per case."""
    lines: list[tuple[str, ...]] = [
        (
            row["case"],
            f"{row['emitted_s'] * 1e3:.3f}",
            f"{row['source_s'] * 1e3:.3f}",
            f"{row['ratio']:.3f} ({row['ratio_quartiles'][0]:.3f}-{row['ratio_quartiles'][1]:.3f})",
            f"{row['difference']:.1e}",
        )
        for row in record.rows
    ]
    table(("case", "emitted ms", "source ms", "emitted / source", "largest difference"), lines)


if __name__ == "__main__":
    main()
