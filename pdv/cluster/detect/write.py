"""A detected cluster as a file. Entry point: `write_cluster`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ir.files.plain_yaml import dump_yaml
from ir.files.writing import make_folder, write_whole
from pdv.cluster.description import Cluster
from pdv.cluster.loader import build_cluster
from pdv.cluster.source import parse_yaml


def write_cluster(content: Mapping[str, Any], comments: Sequence[str], path: Path) -> Cluster:  # Any: YAML
    """Write `content`, under its comments, once it is known to describe a cluster: whole or not at all.

    Raises:
        ClusterError: the content describes none.
        WriteError: the file cannot be written.
    """
    head = "".join(f"# {line}\n" for comment in comments for line in comment.splitlines())
    text = head + dump_yaml(content, allow_unicode=True, default_flow_style=None, width=120)
    cluster = build_cluster(parse_yaml(text, str(path)), path.stem)
    make_folder(path.parent)
    write_whole(path, text.encode())
    return cluster
