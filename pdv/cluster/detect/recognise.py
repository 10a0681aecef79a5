"""Which tool wrote a text, and what it says. Entry point: `read_facts`."""

from __future__ import annotations

import re
from pathlib import Path

from ir.errors import ClusterError
from ir.files.reading import FileKind, read_text, shown
from pdv.cluster.detect.facts import Facts
from pdv.cluster.detect.hosts import LINE, hostfile
from pdv.cluster.detect.nccl import topology_xml
from pdv.cluster.detect.nvidia import ESCAPES, topo_matrix
from pdv.cluster.detect.slurm import topology_conf, topology_yaml

TOOL_OUTPUT = FileKind(1 << 22, ClusterError, "Give the path of a file", "Give one tool's output")


def read_facts(path: Path) -> Facts:
    """What a file says, by its content: its name does not matter.

    Raises:
        ClusterError: not a readable text, of no known kind, or damaged.
    """
    return facts_of(read_text(path, TOOL_OUTPUT), shown(path))


def facts_of(text: str, name: str) -> Facts:
    """What `text` says; `name` stands for the file in messages. Raises as `read_facts`."""
    plain = ESCAPES.sub("", text)
    if plain.lstrip().startswith("<"):
        return topology_xml(plain, name)
    if re.search(r"^\s*GPU0\b", plain, re.MULTILINE):
        return topo_matrix(plain, name)
    if re.search(r"^\s*(SwitchName|BlockName)\s*=", plain, re.MULTILINE | re.IGNORECASE):
        return topology_conf(plain, name)
    if re.search(r"^\s*-?\s*(topology|tree|block|switches)\s*:", plain, re.MULTILINE):
        return topology_yaml(plain, name)
    lines = [line for line in (line.partition("#")[0].strip() for line in plain.splitlines()) if line]
    if lines and any("slots" in line for line in lines) and LINE.fullmatch(lines[0]):
        return hostfile(plain, name)
    raise ClusterError(
        f"{name} is none of the known inputs",
        "Known: `nvidia-smi topo -m`, NCCL topology XML, Slurm topology.yaml or topology.conf, DeepSpeed hostfile",
        "Give one tool's output as it wrote it",
    )
