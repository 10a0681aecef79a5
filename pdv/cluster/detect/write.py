"""A detected cluster as a file. Entry point: `write_cluster`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ir.errors import WriteError
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
    text = head + yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    cluster = build_cluster(parse_yaml(text, str(path)), path.stem)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise WriteError(f"{path} cannot be written ({error.strerror})", mend="Choose another folder") from error
    return cluster
