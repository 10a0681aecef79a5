"""What `pdv profile` and `pdv cluster detect` do, told in plain values. Entry points: ``measure``, ``here``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ir.errors import UsageError, did_you_mean
from ir.files.writing import make_folder, write_whole
from ir.graph import Graph
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.types import DType
from learned_cost.devices.device import FOLDER, DeviceRecord, load_records, record
from learned_cost.profile.detect import CACHE_BYTES, cores_for, detect
from learned_cost.profile.programs.groups import Group, Limits, ListedGroup, OperatorGroup, SubgraphGroup
from learned_cost.profile.programs.pieces import Piece
from learned_cost.profile.programs.planned import read_shipped
from learned_cost.profile.programs.shapes import is_sampled
from learned_cost.profile.rows import Setting
from learned_cost.profile.session import GROUP_OF, Outcome, Progress, run
from learned_cost.profile.store import Store
from learned_cost.profile.timing import Stopwatch

# seconds of a roofline: what is longer than this is not measured, for it would take the time of many others
LONGEST_S = {"cpu": 0.004, "cuda": 0.002}
DTYPES = {"cpu": (DType.F32,), "cuda": (DType.F32, DType.BF16, DType.F16)}


@dataclass(frozen=True)
class Options:
    """What to measure, and where to keep it.

    Attributes:
        ops: names of groups (operators of ir or of the profiles, "subgraph", "triton"); empty: all of them.
        known: name of the device's record; None: found by its driver's name, or measured.
        devices: a folder of further records.
    """

    device: Literal["cpu", "cuda"]
    folder: Path
    budget_s: float
    ops: tuple[str, ...] = ()
    threads: int = 1
    known: str | None = None
    devices: Path | None = None


Planned = tuple[Sequence[Piece], Sequence[tuple[str, Graph]]]


def measure(
    options: Options,
    planned: Planned | None = None,
    progress: Progress = lambda what, share: None,
    listed: Sequence[Piece] = (),
) -> Outcome:
    """Profile the machine at hand; ``planned`` are the shapes of a plan, default those of the example models. Of
    ``listed`` shapes, if there are any, these alone in their order.

    Raises:
        UsageError: if there is no such device or operator.
        DeviceError: if no record has the name asked for.
        WriteError: if the folder cannot be written to.
    """
    device = torch_device(options.device, options.threads)
    wanted = choose_groups(options.ops)
    known = here(options, device)
    setting = Setting.here(device, known)
    limits = Limits(setting, LONGEST_S[options.device], DTYPES[options.device])
    pieces, graphs = planned or read_shipped()
    if planned is None and device.type == "cuda":  # the example models are in float32; GPUs train in bfloat16 as well
        pieces = [*pieces, *(piece.of_dtype(DType.BF16) for piece in pieces)]
    groups: list[Group] = [
        OperatorGroup(op, limits, _weight(OPERATORS[op], found), found, planned is not None)
        for op in OPERATORS
        if is_sampled(op) and op in wanted
        for found in [[piece for piece in pieces if piece.op == op]]
    ]
    if listed:
        groups = [ListedGroup(limits, listed)]
    elif "subgraph" in wanted:
        groups.append(SubgraphGroup(limits, planned=graphs))
    if not listed and "triton" in wanted and device.type == "cuda":
        from learned_cost.profile.programs.fusions import TritonGroup

        groups.append(TritonGroup(limits))
    stopwatch = Stopwatch(device, known.l2_bytes or CACHE_BYTES)
    with Store(options.folder) as store:
        return run(store, groups, setting, stopwatch, budget_s=options.budget_s, progress=progress)


def measure_collectives(options: Options, *, per_node: int, system: str) -> int:
    """Collectives between the processes of a torchrun; how many were measured.

    Raises:
        as ``measure``.
    """
    import torch.distributed as dist

    from learned_cost.profile.collectives import run as run_collectives

    device = torch_device(options.device, options.threads)
    if device.type == "cuda":
        torch.cuda.set_device(int(dist.get_node_local_rank()))
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        setting = Setting.here(device, here(options, device))
        return run_collectives(
            options.folder, setting, device, budget_s=options.budget_s, per_node=per_node, system=system
        )
    finally:
        dist.destroy_process_group()


def _weight(op: Operator, planned: Sequence[Piece]) -> float:
    """How much of the time an operator gets, beside others: products most, for they take most of a step; little what
    no plan has, for it is an element-wise function like another.
    """
    if not planned and op.kind == "map":
        return 0.2
    if op.kind == "contraction":
        return 4.0 if op.is_dense else 3.0
    return 2.0 if op.has_scores or op.bias_rank else 1.0


def torch_device(name: str, threads: int) -> torch.device:
    """The device, with torch's threads set.

    Raises:
        UsageError: if it is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: torch sees no CUDA device here", "Allowed here: cpu", "Write --device cpu")
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False  # float32 rates of records have TF32 off, as torch has for products
    return torch.device(name)


def choose_groups(ops: tuple[str, ...]) -> set[str]:
    """Groups by name; the profiles' names stand for the operators of ir that they measure.

    Raises:
        UsageError: if a name is neither.
    """
    every = {*filter(is_sampled, OPERATORS), "subgraph", "triton"}
    if not ops:
        return every
    found = {GROUP_OF.get(op, op) for op in ops}
    for op in sorted(found - every):
        hint = did_you_mean(op, {*every, *GROUP_OF})
        raise UsageError(f"--ops: nothing measures {op!r}", f"Allowed: {', '.join(sorted(every))}", hint)
    return found


def here(options: Options, device: torch.device) -> DeviceRecord:
    """The record of the device; what is not shipped is kept beside the rows, as ``devices/NAME.yaml``."""
    load_records(options.devices)  # a record that is wrong is told, whether or not it is the one needed
    beside = options.folder / "devices"
    if options.known is not None:
        found = record(options.known, options.devices)
    else:
        kept = {**(load_records(beside) if beside.is_dir() else {})}
        own = [entry for name, entry in kept.items() if (beside / f"{name}.yaml").is_file()]
        found = own[0] if own else detect(device, options.devices)
    if not (FOLDER / f"{found.name}.yaml").is_file() and not (beside / f"{found.name}.yaml").is_file():
        keep(found, beside / f"{found.name}.yaml")
    return found


def keep(found: DeviceRecord, path: Path) -> None:
    """Write a record.

    Raises:
        WriteError: if it cannot be written.
    """
    write(path, found.to_yaml())


def write(path: Path, text: str) -> None:
    """Text into a file, its folder made.

    Raises:
        WriteError: if it cannot be written.
    """
    make_folder(path.parent)
    write_whole(path, text.encode())


def detect_record(device: str, threads: int, count: int, name: str, *, measured: bool) -> tuple[DeviceRecord, int]:
    """The record of the device at hand, renamed if a name is given, and how many there are.

    Raises:
        UsageError: if there is no such device.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = detect(torch_device(kind, threads), shipped=not measured)
    if name:
        found = found.model_copy(update={"name": name})
    return found, count or (max(1, torch.cuda.device_count()) if kind == "cuda" else cores_for(threads))


def cluster_of(found: DeviceRecord, count: int) -> dict[str, Any]:  # Any: YAML
    """A cluster file of ``count`` such devices in one node, as ``pdv optimize`` takes it."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    device = {
        "name": found.name,
        "kind": found.kind,
        "memory": f"{found.memory_bytes // count / 2**30:.4g} GiB",
        "peak": {names[key]: f"{rate / 1e12:.6g} TFLOP/s" for key, rate in found.peak_flops.items() if key in names},
        "memory_bandwidth": f"{found.memory_bandwidth_bytes_per_s / 1e9:.6g} GB/s",
        "launch_latency": "3 us",
        "efficiency": 0.95,
    }
    if found.kind == "gpu":
        device |= {"memory": f"{found.memory_bytes / 2**30:.4g} GiB", "launch_latency": "5 us", "efficiency": 0.75}
    if found.kind == "cpu" and count > (cores := cores_for(found.sm_count)):
        device["share"] = cores / count
    node: dict[str, Any] = {"devices": count, "device": device}
    if count > 1:
        node["link"] = _link(found)
    return {"nodes": [node]}


def _link(found: DeviceRecord) -> str:
    if found.kind == "cpu":
        return "loopback-gloo"
    link = (found.link or "").lower()
    return next(
        (name for name in ("nvlink2", "nvlink3", "nvlink4", "pcie3", "pcie4", "pcie5") if name in link), "pcie4"
    )
