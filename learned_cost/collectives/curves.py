"""What the collective model says of one mesh axis: seconds by bytes, for the links that it was trained on.

Entry point: ``axis_curve``. A link that the weights do not know by name (a user's own, a network between nodes, whose
fabric no name tells) gets no curve: the axis then keeps its α and β.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from learned_cost.collectives.model import CollectiveModel, load_collective_model
from learned_cost.collectives.rows import Cases, device_of
from learned_cost.data.measured import ON_CORES, PROFILED_CORES

# Links of cluster files, as profiles call them.
INTERCONNECTS: Mapping[str, str] = {
    "nvlink3": "NVLink3+NVSwitch",
    "nvlink4": "NVLink4+NVSwitch",
    "pcie3": "PCIe3",
    "pcie4": "PCIe4",
    "pcie5": "PCIe5",
    "loopback-gloo": ON_CORES,
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(float(256 << power) for power in range(23))  # 256 B to 1 GiB
GLOO_VERSION = "2.13.0+cpu"  # of PyTorch, that the shipped profile of processes on cores was measured with
GLOO_STD = 0.3  # of that profile's log seconds about the model's (small messages: the scheduler decides)
UNSURE = 1.0  # a deviation of log seconds above which nothing is said


@lru_cache(maxsize=1024)
def axis_curve(
    device: str, link: str, size: int, share: float = 1.0, model: CollectiveModel | None = None
) -> tuple[list[tuple[str, float, float]], float] | None:
    """((collective, bytes, seconds) of each size, relative deviation) among ``size`` devices, or None: not known.

    Processes on one machine talk by gloo; devices by NCCL from PyTorch. ``share`` is a process's part of a core: what
    a process waits for is another one's turn, so only measurements with that share tell.
    """
    interconnect, record = INTERCONNECTS.get(link), device_of(device)
    on_cpu = record is not None and record.kind == "cpu"
    if interconnect is None or record is None or on_cpu != (interconnect == ON_CORES) or size < 2:
        return None
    if on_cpu and abs(share - min(1.0, PROFILED_CORES / size)) > 0.01:
        return None
    model = model or load_collective_model()
    count = len(COLLECTIVES) * len(SIZES)

    def same(name: str) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
        return np.full(count, name, dtype=object)

    asked = np.array(COLLECTIVES, dtype=object).repeat(len(SIZES))
    whole = np.full(count, float(size))
    library, version = ("gloo", GLOO_VERSION) if on_cpu else ("nccl(torch.distributed)", "")
    cases = Cases(
        same(f"cpu-{size}-a-node" if on_cpu else ""),
        same(record.name),
        same(interconnect),
        asked,
        same(library),
        same(version),
        same("fp32"),
        whole,
        whole,
        np.ones(count),
        np.tile(np.array(SIZES), len(COLLECTIVES)),
    )
    if on_cpu and not model.known(cases)[0]:
        return None  # processes that share cores are unlike any other system: only measurements tell
    mean, std = model.price(cases)
    deviation = max(float(np.median(std)), GLOO_STD if on_cpu else 0.0)
    if deviation > UNSURE:
        return None
    rows = zip(asked.tolist(), cases.bytes.tolist(), np.exp(mean).tolist(), strict=True)
    return [(str(name), num_bytes, float(f"{seconds:.6g}")) for name, num_bytes, seconds in rows], deviation
