"""Algebra alone: the program emitted for one device against the module it came from, both eager or both compiled.

    python benchmarks/single_device.py [--smoke] [--json OUT] [--compile] [--models A,B] [--modes train,infer]
                                       [--unrewritten] [--pairs N]
    python benchmarks/single_device.py --rows A.json B.json [--json OUT]

A model is planned for one device (only rewrites are left to choose), saved, built there. A pass is forward, loss and
backward, or forward alone. The two sides alternate call by call, or a few calls at a time where a pass is short; each
pair gives a ratio, source over emitted, and the median over pairs is reported, so that a busy machine slows both
alike. With --unrewritten the plan may take no rewrite: what is gained then is the emitted program's being plainer than
the module, not the algebra's doing. On a CPU: one thread, CPU time; on a GPU: CUDA events, TF32 off. With --rows
nothing is run: records made before are joined, later rows replacing earlier ones of the same case.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pdv
from benchmarks.measured.devices import default_device, label, one_device
from benchmarks.measured.timing import sample, summary
from benchmarks.models import Size, build, token_ids
from benchmarks.record import Record, arguments, table
from pdv.config import Mode
from pdv.plan.package import import_package

FEWEST, MOST = 11, 25  # pairs of samples; between them, as many as fit into
PAIRS_S = 4.0
SAMPLE_S = {"cpu": 0.02, "cuda": 0.05}  # a sample is as many calls as fit into this, and one at least
SLOWER = 0.98  # of the source's speed, the least that is asked
# Largest difference over the largest element, of the output and of each gradient: float32 as for plans on a mesh,
# bfloat16 twelve layers deep at 8 bits. A gradient below SCALE_FLOOR of the largest of all is rounding: an attention
# key's bias has none.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
SCALE_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the set at a batch, and a sequence if it reads token ids (0: the size's own)."""

    model: str
    size: Size
    batch: int
    sequence: int = 0
    dtype: torch.dtype = torch.float32
    mode: Mode = "train"
    unrewritten: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        rows = f"{self.batch} x {self.sequence}" if self.sequence else str(self.batch)
        name = f"{self.model} {self.size}, {rows}, {str(self.dtype).removeprefix('torch.')}, {self.mode}"
        return name + ", no rewrites" * self.unrewritten


def cases_on(device: torch.device, *, smoke: bool) -> list[Case]:
    """GPT-2, host-bound and device-bound, models with work to share, and others; on a CPU at what it can bear."""
    small = Case("gpt2", "small", 8, 16)
    if smoke:
        return [small]
    modes: tuple[Mode, ...] = ("train", "infer")
    cpu = device.type == "cpu"
    batch = 1 if cpu else 16
    names = ("squeezenet", "resnext50", "inception-v3", "resnet50", "vit") if cpu else ("resnet50", "vit")
    language: list[tuple[str, Size, int, int]] = [("bert", "full", batch, 64)]
    if cpu:
        language = [("gpt2", "full", 2, 64), *language, ("llama", "small", 8, 32)]
    shared = [Case("nasrnn", "full", batch, mode=mode) for mode in modes]
    shared += [Case(*sizes, mode=mode) for sizes in language for mode in modes]
    shared += [Case(name, "full", batch, mode=mode) for name in names for mode in modes]
    if cpu:
        return [small, *shared]
    sizes: list[tuple[Size, int, int]] = [("full", 8, 64), ("full", 8, 1024)]
    of_gpt2 = [Case("gpt2", *size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    return [*of_gpt2, *(case for case in shared if case.mode == "train")]


def main() -> None:
    """Compare and time each case; fail if any differs by more than rounding."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="run both sides under torch.compile")
    parser.add_argument("--unrewritten", action="store_true", help="plan without algebraic rewrites")
    parser.add_argument("--models", default="", help="only these, comma-separated")
    parser.add_argument("--modes", default="train,infer", help="comma-separated")
    parser.add_argument("--pairs", type=int, default=FEWEST, help="pairs of samples at least (default: %(default)s)")
    parser.add_argument("--rows", type=Path, nargs="+", metavar="JSON", default=[], help="join earlier records")
    options = parser.parse_args()
    record = Record()
    if options.rows:
        rows = [row for path in options.rows for row in json.loads(path.read_text())["rows"]]
        record.rows = list({(row["case"], row["compiled"]): row for row in rows}.values())
        record.rows.sort(key=lambda row: row["compiled"])
    else:
        measure(record, options)
    show(record)
    for row in record.rows:
        low, high = row["ratio_quartiles"]
        way = "compiled" if row["compiled"] else "eager"
        record.claim(
            f"source over emitted, {row['case']}, {way}", row["ratio"], "x", f"(quartiles {low:.3f}-{high:.3f})"
        )
    record.write(options.json)
    for row in record.rows:
        if row["ratio"] < SLOWER:
            print(f"slower than the source: {row['case']}, {row['ratio']:.3f}", file=sys.stderr)
    wrong = [row["case"] for row in record.rows if row["difference"] > row["tolerance"]]
    assert not wrong, f"emitted and source differ: {wrong}"


def measure(record: Record, options: argparse.Namespace) -> None:
    """Measure each case that the options ask for; the record is written as it grows."""
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    device = default_device()
    if device.type == "cpu" and not keep_freed_memory():
        print("this C library returns freed memory as it likes, which sides may feel unequally", file=sys.stderr)
    modes = options.modes.split(",")
    models = options.models.split(",") if options.models else None
    for case in cases_on(device, smoke=options.smoke):
        if case.mode not in modes or (models and case.model not in models):
            continue
        chosen = replace(case, unrewritten=options.unrewritten)
        print(f"{chosen.name} …", file=sys.stderr, flush=True)
        record.rows.append(compare(chosen, device, compiled=options.compile, pairs=options.pairs))
        record.write(options.json)


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep what is freed, as PyTorch does on GPUs; false where it cannot be had.

    Else it hands the top of its heap back and faults it in anew, a tenth of a pass, for whichever side ends there.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    return bool(mallopt(trim_threshold, 2**31 - 1) and mallopt(mmap_max, 0))


def compare(case: Case, device: torch.device, *, compiled: bool, pairs: int) -> dict[str, Any]:
    """Both sides of one case: how far apart their outputs and gradients are, and their times."""
    source, emitted, inputs, rules = both(case, device)
    emitted_pass, source_pass = (one_pass(side, inputs, case.mode, compiled=compiled) for side in (emitted, source))
    found, expected = emitted_pass(), source_pass()
    difference = apart(found, expected)
    if case.mode == "train":
        difference = max(difference, gradients_apart(emitted, source))
    times = timed_in_turn(emitted_pass, source_pass, device, fewest=pairs)
    ratios = summary([theirs / ours for ours, theirs in times])
    row: dict[str, Any] = {
        "case": case.name,
        "device": label(device),
        "compiled": compiled,
        "rules": rules,
        "difference": difference,
        "tolerance": TOLERANCE[case.dtype],
        "emitted_s": summary([ours for ours, _ in times]).median_s,
        "source_s": summary([theirs for _, theirs in times]).median_s,
        "ratio": ratios.median_s,
        "ratio_quartiles": [ratios.low_s, ratios.high_s],
        "pairs": len(times),
    }
    if device.type == "cuda":
        row |= {
            f"{name}_peak_bytes": peak(run, device)
            for name, run in (("emitted", emitted_pass), ("source", source_pass))
        }
    return row


def both(case: Case, device: torch.device) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...], dict[str, int]]:
    """The source module and the emitted one on the device, a batch, and the rewrites that the plan took."""
    module, inputs = build(case.model, case.size, batch=case.batch)
    module.train(case.mode == "train")
    if case.sequence:
        vocabulary = int(inputs[0].max()) + 1
        inputs = token_ids(vocabulary, case.batch, case.sequence)
    enliven(module, inputs)
    rules = "none" if case.unrewritten else "shipped"
    plan = pdv.optimize(module, inputs, cluster=one_device(device), mode=case.mode, rules=rules, check=False)
    with tempfile.TemporaryDirectory() as scratch:
        package = plan.save(Path(scratch) / "alone_pdv")
        emitted = import_package(package).build(device=device, dtype=case.dtype)
    moved = tuple(x.to(device, case.dtype) if x.is_floating_point() else x.to(device) for x in inputs)
    taken = Counter(step["rule"] for step in plan.document["derivation"] if step["kind"] == "algebraic")
    return module.to(device, case.dtype), emitted, moved, dict(taken)


@torch.no_grad()
def enliven(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Weights as He et al. (ICCV 2015) and running statistics of the batch: without, what goes in dies out on its way
    through a deep convolutional network, and outputs would agree whatever lies in between.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    if norms:
        training = module.training
        for norm in norms:
            norm.momentum = 1.0
        module.train()(*inputs)
        module.train(training)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


@cache
def directions(shape: torch.Size, device: torch.device) -> Tensor:
    """Random, always the same: [*shape]. Loss is the product with it, as a sum of squares is constant after a norm."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def one_pass(module: nn.Module, inputs: tuple[Tensor, ...], mode: Mode, *, compiled: bool) -> Callable[[], Tensor]:
    """Forward, loss and backward into fresh gradients, or forward without; gives the output."""
    run = torch.compile(module) if compiled else module

    def infer() -> Tensor:
        with torch.no_grad():
            output: Tensor = run(*inputs)
        return output

    def train() -> Tensor:
        module.zero_grad(set_to_none=True)
        output: Tensor = run(*inputs)
        torch.autograd.backward((output.float() * directions(output.shape, output.device)).mean())
        return output.detach()

    return train if mode == "train" else infer


def timed_in_turn(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device, *, fewest: int
) -> list[tuple[float, float]]:
    """Seconds of a call of each side, in pairs of samples that begin in turn with either, after a warm-up."""
    call_s = max(sample(side, device, 2) for side in (ours, theirs))
    calls = max(1, min(20, int(SAMPLE_S[device.type] / call_s)))
    times = []
    for index in range(max(fewest, min(MOST, int(PAIRS_S / (2 * calls * call_s))))):
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
            row["case"] + ", compiled" * row["compiled"],
            f"{row['emitted_s'] * 1e3:.3f}",
            f"{row['source_s'] * 1e3:.3f}",
            f"{row['ratio']:.3f} ({row['ratio_quartiles'][0]:.3f}-{row['ratio_quartiles'][1]:.3f})",
            f"{row['difference']:.1e}",
            ", ".join(f"{rule} x{count}" for rule, count in row["rules"].items()),
        )
        for row in record.rows
    ]
    table(("case", "emitted ms", "source ms", "source / emitted", "largest difference", "rewrites"), lines)


if __name__ == "__main__":
    main()
