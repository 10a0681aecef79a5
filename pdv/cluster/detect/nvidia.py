"""`nvidia-smi topo -m`: how GPUs and network adapters of one node are joined. Entry points: `topo_matrix`,
`run_nvidia_smi`.

NV# is # NVLinks; PIX, PXB, PHB one PCIe switch, several, or a host bridge; NODE across host bridges of one socket;
SYS across sockets (NVIDIA, `nvidia-smi topo -h`).
"""

from __future__ import annotations

import re
import shutil
import subprocess

from ir.errors import ClusterError
from pdv.cluster.detect.facts import Facts, NodeFacts, Pair
from pdv.cluster.units import shorten

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
COLUMN = re.compile(r"(GPU|NIC|mlx5_)\d+")
CELL = re.compile(r"X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC")
LEGEND = re.compile(r"^\s*NIC(\d+):\s*(\S+)", re.MULTILINE)
NEAR = ("PIX", "PXB")
FAR = ("SYS", "SOC")


def run_nvidia_smi() -> str | None:
    """What `nvidia-smi topo -m` prints here; None where it is not installed or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "topo", "-m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603  # fixed
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and "GPU0" in done.stdout else None


def topo_matrix(text: str, name: str) -> Facts:
    """The facts of a matrix.

    Raises:
        ClusterError: no matrix in it, a row that is cut short, or a cell of an unknown kind.
    """
    lines = [line for line in ESCAPES.sub("", text).splitlines() if line.strip()]
    head = next(
        (place for place, line in enumerate(lines) if line.split()[0] == "GPU0" and "X" not in line.split()), -1
    )
    if head < 0:
        raise ClusterError(f"{name}: no line of column names (GPU0 GPU1 ...)", mend="Give all of `nvidia-smi topo -m`")
    columns = [word for word in lines[head].split() if COLUMN.fullmatch(word)]
    cells: dict[tuple[str, str], str] = {}
    for line in lines[head + 1 :]:
        label, *words = line.split()
        if label not in columns:
            break  # the legend
        row = words[: len(columns)]
        wrong = [word for word in row if not CELL.fullmatch(word)]
        if wrong or len(row) < len(columns):
            what = f"{shorten(wrong[0])} is no kind of connection" if wrong else "the row is cut short"
            raise ClusterError(f"{name}, row {label}: {what}", "Allowed: X, NV#, PIX, PXB, PHB, NODE, SYS")
        cells.update({(label, column): word for column, word in zip(columns, row, strict=True)})
    gpus = [column for column in columns if column.startswith("GPU")]
    missing = [gpu for gpu in gpus if (gpu, gpu) not in cells]
    if missing:
        raise ClusterError(f"{name}: no row {missing[0]}", mend="Give all of `nvidia-smi topo -m`")
    ports = _ports(cells, gpus, [column for column in columns if not column.startswith("GPU")])
    names = [found[2] for found in LEGEND.finditer(text)]
    infiniband = all(entry.startswith("mlx") for entry in names) if names else None
    return Facts("nvidia-smi topo -m", node=_node(cells, gpus, ports, infiniband))


def _node(cells: dict[tuple[str, str], str], gpus: list[str], ports: int, infiniband: bool | None) -> NodeFacts:
    links: dict[Pair, int] = {}
    for first in range(len(gpus)):
        for second in range(first + 1, len(gpus)):
            cell = cells[gpus[first], gpus[second]]
            if cell.startswith("NV"):
                links[first, second] = int(cell[2:])
    # every GPU sees every other over all its links: a switch joins them
    counts = set(links.values())
    full = len(gpus) > 2 and len(links) == len(gpus) * (len(gpus) - 1) // 2 and len(counts) == 1
    switched = counts.pop() if full else 0
    sockets = () if switched else _sockets(cells, gpus)
    return NodeFacts(len(gpus), {} if switched else links, switched, sockets, ports, infiniband=infiniband)


def _sockets(cells: dict[tuple[str, str], str], gpus: list[str]) -> tuple[tuple[int, ...], ...]:
    """GPUs that no SYS parts; of two with NVLinks, whose cell hides it, those that see the others alike."""

    def together(first: str, second: str) -> bool:
        cell = cells[first, second]
        if not cell.startswith("NV"):
            return cell not in FAR
        told = [(cells[first, gpu], cells[second, gpu]) for gpu in gpus if gpu not in {first, second}]
        return all((a in FAR) == (b in FAR) for a, b in told if not a.startswith("NV") and not b.startswith("NV"))

    sockets: list[list[int]] = []
    for place, gpu in enumerate(gpus):
        own = next((socket for socket in sockets if all(together(gpu, gpus[other]) for other in socket)), None)
        if own is None:
            sockets.append([place])
        else:
            own.append(place)
    return tuple(tuple(socket) for socket in sockets)


def _ports(cells: dict[tuple[str, str], str], gpus: list[str], adapters: list[str]) -> int:
    """Adapters beside a GPU; where none is, all of them (others are mostly for storage)."""
    near = [adapter for adapter in adapters if any(cells[gpu, adapter] in NEAR for gpu in gpus)]
    return len(near or adapters)
