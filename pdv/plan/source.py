"""The source graph beside its plan, so that a plan can be proved again anywhere: ``source.graph`` and its constants."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ir.errors import ModelError, UsageError, VerificationError
from ir.graph import Graph
from ir.text import constants, parse_graph, print_graph
from pdv.plan.seal import DOCUMENT

GRAPH = "source.graph"
CONSTANTS = "source.safetensors"


def write_source(graph: Graph, directory: Path) -> dict[str, str]:
    """Print the graph; constants too large for a line go to a file of their own. The SHA-256 of each file."""
    (directory / GRAPH).write_text(print_graph(graph), encoding="utf-8", newline="\n")
    arrays = constants(graph)
    if arrays:
        from safetensors.numpy import save  # which writes no file itself: its errors do not say that a disk is full

        (directory / CONSTANTS).write_bytes(save(dict(sorted(arrays.items()))))
    return {name: file_digest(directory / name) for name in (GRAPH, CONSTANTS) if (directory / name).exists()}


def check_outside_packages(target: Path) -> None:
    """Whether what is written at ``target`` is no part of a package: replacing that one would take it away.

    Raises:
        UsageError: naming the package.
    """
    for folder in target.resolve().parents:
        if (folder / DOCUMENT).is_file() and (folder / GRAPH).is_file():
            raise UsageError(
                f"{target} lies in the package {folder}",
                "A place outside of packages",
                f"Write it beside {folder.name}",
            )


def read_source(directory: Path, files: Mapping[str, str] | None = None) -> Graph:
    """``read_source`` after ``write_source`` gives the graph back; ``files`` is what that returned, to be held to.

    Raises:
        VerificationError: if a file is missing, is another than was written, or none that this version reads.
    """
    if files is None:
        files = {name: file_digest(directory / name) for name in (GRAPH, CONSTANTS) if (directory / name).exists()}
    if set(files) not in ({GRAPH}, {GRAPH, CONSTANTS}):
        raise VerificationError(f"plan.json names the files {sorted(files)}", f"{GRAPH} and {CONSTANTS}", "Plan again")
    for name, digest in files.items():
        if file_digest(directory / name) != digest:
            raise VerificationError(f"{directory / name} is not the file that was written with the plan", "", _MEND)
    try:
        arrays = {}
        if CONSTANTS in files:
            from safetensors.numpy import load_file

            arrays = load_file(directory / CONSTANTS)
        return parse_graph((directory / GRAPH).read_text(encoding="utf-8"), arrays)
    except (ModelError, ArithmeticError, AttributeError, ValueError, OSError) as error:
        raise VerificationError(f"{directory / GRAPH} cannot be read: {error}", "", _MEND) from error


_MEND = "Restore it, or plan again"


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, read piece by piece.

    Raises:
        VerificationError: if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise VerificationError(f"{path} cannot be read: {error.strerror}", "", _MEND) from error
