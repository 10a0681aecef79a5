"""A measurement as a row: the kernel's columns, what was measured, and where and with what.

Entry points: ``Setting`` (what all rows of a run share) and ``kernel_row``.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import platform
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from learned_cost.data.kernel import DIMS, FUSED, Kernel, Subgraph
from learned_cost.devices.device import DeviceRecord
from learned_cost.profile.store import Row
from learned_cost.profile.timing import Caches, Timing

FOLDS = 5
SOURCE = "pdv-profile"


@dataclass(frozen=True)
class Setting:
    """What all rows of a run share: device, software, threads, and the run's own name."""

    record: DeviceRecord
    threads: int
    versions: str
    driver: str
    host: str
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @classmethod
    def here(cls, device: torch.device, record: DeviceRecord) -> Setting:
        """As this process finds it."""
        return cls(record, torch.get_num_threads(), versions(), driver(device), processor())

    def columns(self) -> dict[str, Any]:  # Any: text and numbers
        """As columns of a row."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        return {
            "source": SOURCE,
            "gpu": self.record.name,
            "threads": self.threads,
            "versions": self.versions,
            "driver": self.driver,
            "host": self.host,
            "run": self.run,
            "date": now,
            "backend": "torch",
            "backend_version": torch.__version__,
            "split": "train",
            "suspect": False,
            "n_dup": 1,
        }

    def roofline_s(self, flops: float, moved: float, dtype: str) -> float:
        """Seconds at the record's peak rate and memory speed."""
        peak = self.record.peak(dtype) or self.record.peak("fp32")
        arithmetic = flops / peak if peak else 0.0
        return max(arithmetic, moved / self.record.memory_bandwidth_bytes_per_s)


def kernel_row(
    setting: Setting,
    what: Kernel | Subgraph,
    timing: Timing,
    *,
    l2: Caches = "warm",
    layout: str = "",
    plan: str = "",
    name: str = "",
) -> Row:
    """The row of one measurement; ``name``: of our own kernel."""
    first = what if isinstance(what, Kernel) else what.kernels[0]
    flops = what.flops
    moved = what.bytes if isinstance(what, Kernel) else what.traffic
    row: dict[str, Any] = {  # Any: text and numbers
        **setting.columns(),
        **shape_columns(what),
        "dtype": first.dtype,
        "direction": first.direction,
        "stack": timing.stack or first.stack,
        "l2": l2,
        "layout": layout or None,
        "plan": plan or None,
        "kernel": name or None,
        "flops": flops,
        "bytes": moved,
        "roofline_us": setting.roofline_s(flops, moved, first.dtype) * 1e6,
        "latency_us": timing.median_s * 1e6,
        "std_us": timing.std_s * 1e6,
        "repeats": timing.repeats,
        "fold": fold(what),
    }
    return {key: value for key, value in row.items() if value is not None}


def kernel_of(row: Row) -> Kernel:
    """The kernel that a row of ours describes: the inverse of ``kernel_row``.

    Raises:
        KeyError, ValueError: if it is no row of ours, or a subgraph's.
    """
    dims = {name: row[name] for name in DIMS if row.get(name) is not None}
    names = ("op", "kind", "dtype", "flops", "bytes", "direction", "stack")
    extents = json.loads(row["dims_json"])["extents"]
    return Kernel.from_dict({**{name: row[name] for name in names}, "dims": dims, "extents": extents})


def shape_columns(what: Kernel | Subgraph) -> dict[str, Any]:  # Any: text and numbers
    """Operator and sizes: by column where there is one, the rest as JSON."""
    if isinstance(what, Subgraph):
        return {"op": FUSED, "dims_json": what.to_json()}
    assert set(what.dims) <= set(DIMS), what.dims
    return {"op": what.op, "kind": what.kind, **what.dims, "dims_json": json.dumps({"extents": what.extents})}


def shape_key(what: Kernel | Subgraph) -> str:
    """Operator and shape as text, whatever the device and the dtype: rows of a fold share it."""
    if isinstance(what, Subgraph):
        nodes = [[k.op, sorted(k.dims.items()), k.extents, k.direction] for k in what.kernels]
        return json.dumps([FUSED, nodes, what.edges])
    return json.dumps([what.op, sorted(what.dims.items()), what.extents])


def fold(what: Kernel | Subgraph) -> int:
    """0 to 4, of operator and shape alone, so that no shape is both trained on and tested."""
    return int(hashlib.sha256(shape_key(what).encode()).hexdigest()[:8], 16) % FOLDS


def measured_key(row: Row) -> tuple[object, ...]:
    """Equal for measurements of the same thing: what a resumed run skips."""
    names = ("gpu", "op", "dtype", *DIMS, "dims_json", "direction", "l2", "layout", "threads", "kernel")
    stack = "torch" if row.get("stack") == "cudagraph" else row.get("stack")
    return (*(row.get(name) for name in names), stack)


def versions() -> str:
    """Library versions that decide which kernels run."""
    found: Mapping[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
    }
    try:
        import triton
    except ImportError:
        return "; ".join(f"{name} {value}" for name, value in found.items() if value)
    return "; ".join(f"{name} {value}" for name, value in {**found, "triton": triton.__version__}.items() if value)


def driver(device: torch.device) -> str:
    """The GPU driver's version, or what a CPU's kernels were built for."""
    if device.type != "cuda":
        return f"cpu capability {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device)
    path = Path("/proc/driver/nvidia/version")
    told = path.read_text(encoding="utf-8").splitlines()[0] if path.is_file() else "driver not told"
    return f"{name}; {told}"


def processor() -> str:
    """The host's processor and system, without the machine's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {platform.system()}"
