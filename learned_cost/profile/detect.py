"""The record of the device at hand: a shipped one if its driver's name is known, else what torch tells and a few
seconds of measuring. Entry points: ``detect``, ``cores_for``.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from pathlib import Path

import torch

from learned_cost.devices.device import DeviceRecord, Dtype, find, load_records
from learned_cost.profile.rows import processor, versions
from learned_cost.profile.timing import Stopwatch

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROBE = 256  # size of a product that tells whether a dtype is emulated
CACHE_BYTES = 32 << 20  # of a CPU that does not tell
MEASURE_S = 0.4  # of each figure


def detect(device: torch.device, folder: Path | None = None, *, shipped: bool = True) -> DeviceRecord:
    """The record of ``device``; ``shipped`` False: measure it although a record is known.

    A CPU is described as one device with torch's threads (``torch.set_num_threads``).

    Raises:
        DeviceError: if ``folder`` holds no records.
    """
    if device.type == "cuda":
        known = find(torch.cuda.get_device_name(device), load_records(folder).values()) if shipped else None
        return known or _gpu(device)
    return _cpu(device)


def cores_for(threads: int) -> int:
    """For how many processes of so many threads this machine has cores; at least one."""
    return max(1, len(os.sched_getaffinity(0)) // threads)


def _gpu(device: torch.device) -> DeviceRecord:
    told = torch.cuda.get_device_properties(device)
    name = torch.cuda.get_device_name(device)
    watch = Stopwatch(device, told.L2_cache_size, MEASURE_S)
    clock_khz = getattr(told, "clock_rate", None)  # torch before 2.6 does not tell
    return DeviceRecord(
        name=_plain(name),
        kind="gpu",
        aliases=(name,),
        vendor="nvidia" if torch.version.cuda else "amd",
        arch=str(getattr(told, "gcnArchName", f"sm_{told.major}{told.minor}")),
        compute_capability=f"{told.major}.{told.minor}",
        sm_count=told.multi_processor_count,
        boost_hz=clock_khz * 1e3 if clock_khz else None,
        memory_bytes=told.total_memory,
        peak_flops=_peaks(watch, (4096, 8192)),
        memory_bandwidth_bytes_per_s=_bandwidth(watch, told.total_memory // 16),
        l2_bytes=told.L2_cache_size or None,
        shared_memory_bytes_per_sm=getattr(told, "shared_memory_per_multiprocessor", None),
        source=_source(),
        sources={"peak_flops": "best of measured square products", "memory_bandwidth_bytes_per_s": "measured copy"},
    )


def _cpu(device: torch.device) -> DeviceRecord:
    threads = torch.get_num_threads()
    cache = _cache_bytes(3) or _cache_bytes(2)
    watch = Stopwatch(device, cache or CACHE_BYTES, MEASURE_S)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = processor().split(",")[0]
    return DeviceRecord(
        name=_plain(f"{name} {threads} thread{'s' if threads > 1 else ''}"),
        kind="cpu",
        vendor=next((vendor for vendor in ("amd", "intel", "apple") if vendor in name.lower()), "unknown"),
        arch=torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-"),
        sm_count=threads,
        memory_bytes=memory,
        peak_flops=_peaks(watch, (768, 1536)),
        memory_bandwidth_bytes_per_s=_bandwidth(watch, memory // 16),
        l2_bytes=cache,
        shared_memory_bytes_per_sm=_cache_bytes(2),
        source=_source(),
        sources={
            "peak_flops": "best of measured square products",
            "memory_bandwidth_bytes_per_s": "best of measured sums of arrays",
            "memory_bytes": "all of the machine's",
        },
    )


def _peaks(watch: Stopwatch, sizes: tuple[int, ...]) -> dict[Dtype, float]:
    """The best rate of square products, by dtype; a dtype that is slower than float32 is not worth a rate."""
    found: dict[Dtype, float] = {}
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, dtype in DTYPES.items():
        if name != "fp32" and _rate(watch, PROBE, dtype) < 0.5 * _rate(watch, PROBE, torch.float32):
            continue  # emulated: larger products would take minutes
        best = max(_rate(watch, size, dtype) for size in sizes)
        if name == "fp32" or best > found["fp32"]:
            found[name] = _round_up(best)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return found


def _rate(watch: Stopwatch, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of a square product."""
    a, b = (torch.randn(size, size, device=watch.device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / watch.measure(lambda: torch.matmul(a, b)).best_s


def _bandwidth(watch: Stopwatch, most: int) -> float:
    """Bytes a second of a sum of two arrays far beyond the cache."""
    count = min(most, 8 << 30 if watch.device.type == "cuda" else 256 << 20) // 12
    a, b, out = (torch.ones(count, device=watch.device) for _ in range(3))
    return _round_up(12.0 * count / watch.measure(lambda: torch.add(a, b, out=out)).best_s)


def _round_up(value: float) -> float:
    return float(f"{value:.3g}")


def _cache_bytes(level: int) -> int | None:
    """Of the first core, as Linux tells."""
    for index in range(8):
        folder = Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}")
        if folder.is_dir() and (folder / "level").read_text().strip() == str(level):
            size = (folder / "size").read_text().strip()
            return int(size.rstrip("KM")) << (10 if size.endswith("K") else 20)
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+]+", "-", name).strip("-")[:60]


def _source() -> str:
    return f"measured by `pdv cluster detect` on {dt.datetime.now(dt.UTC).date()} ({versions()})"
