"""Plan: what ``optimize`` gives. It saves itself as a package that needs only torch, and loads back from one."""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ir.errors import UsageError, WriteError
from ir.files.reading import read_text
from ir.files.writing import undisturbed
from ir.graph import Graph
from ir.mesh import Mesh
from pdv.folders import text_of
from pdv.guard import door, note
from pdv.page import REPORT, write_page
from pdv.plan.seal import DOCUMENT, PLAN, parse_document, write_document
from pdv.plan.source import check_outside_packages, write_source

if TYPE_CHECKING:
    import torch

    from pdv.emit.emission import Emission
    from pdv.frontend.program import Weights


@dataclass(frozen=True, repr=False)
class Plan:
    """A verified plan of one model on one cluster.

    Attributes:
        document: plan.json (docs/plan-format.md).
        source: the serial graph, as the frontend lowered it.
        mesh: the axes that this graph names.
        emission: what is written of the parallel computation graph that the document's derivation makes of it.
        weights: the source's tensors, read when saving.
        drawn: what report.html tells beside plan.json (``pdv.report.html.facts``), where that page is to be written.
        told: what is read first of the plan, as the command line prints it (``pdv.report.summary``).
    """

    document: Mapping[str, Any]  # Any: JSON
    source: Graph
    mesh: Mesh
    emission: Emission
    weights: Weights
    drawn: Mapping[str, Any] | None = field(default=None, compare=False)
    told: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        """As the command line prints it, a line each."""
        rows = {"plan": self.source.name, **self.told}
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items())

    @property
    def pcg(self) -> Graph:
        """The parallel computation graph."""
        return self.emission.pcg

    def made_by(self, command: str) -> Plan:
        """The same plan, naming the command that made it at the head of the emitted program."""
        return replace(self, document={**self.document, "command": text_of(command)})

    @door("Plan.save")
    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False, link_weights: bool = False) -> Path:
        """Write the package; it appears whole or not at all.

        link_weights: read weights at build from the checkpoint that was given (``weights=``), not from a copy.

        Raises:
            UsageError: if the directory exists and is not to be overwritten, or is no plan's, or there are no weights,
                or none in a checkpoint that could be linked.
        """
        from pdv.emit.package import write_package

        if not self.weights.names and self.source.params:
            raise UsageError(
                f"{self.source.name} was described by --arch and has no weights, so there is no program to write",
                "Its plan alone",
                "Plan the model itself, or save the plan (Plan.save_plan)",
            )

        if link_weights and not self.weights.files:
            what = "there is no checkpoint whose weights could be linked"
            raise UsageError(what, mend="Plan with --weights (weights=), or leave --link-weights out")

        def write(built: Path, document: Mapping[str, Any]) -> None:
            write_package(self.emission, document, self.weights, built, link=link_weights)

        return self._write(Path(directory).absolute(), write, overwrite=overwrite)

    @door("Plan.save_plan")
    def save_plan(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write plan.json and the source graph without a program: what can be verified, explained and simulated.

        Raises:
            UsageError: as ``save``.
        """
        return self._write(Path(directory).absolute(), write_document, overwrite=overwrite)

    def _write(self, target: Path, write: Callable[[Path, Mapping[str, Any]], None], *, overwrite: bool) -> Path:
        """What ``write`` puts into a directory, given plan.json, and the source graph; whole or not at all."""
        check_target(target, overwrite=overwrite)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                built = scratch / "package"
                built.mkdir()
                files = write_source(note(self.source), built)
                document = {**self._save(), "files": files}
                write(built, document)
                if self.drawn is not None:
                    (built / REPORT).write_text(write_page(document, self.drawn), encoding="utf-8", newline="\n")
                with undisturbed():
                    _move(built, target, aside=scratch / "replaced")
            finally:
                with undisturbed():
                    shutil.rmtree(scratch, ignore_errors=True)
        except OSError as error:
            what = f"{target} cannot be written ({error.strerror or error})"
            raise WriteError(what, mend="Free some room, or choose another folder") from error
        return target

    def build(self, device: str | None = None, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """The sharded module of this process, as the saved package's ``build`` gives it."""
        with tempfile.TemporaryDirectory(prefix="pdv-plan-") as scratch:
            target = Path(scratch) / package_name(str(self.document["source"]["name"]))
            package = import_package(self.save(target, link_weights=bool(self.weights.files)))
            text = (target / "model.py").read_text(encoding="utf-8")
            # without a time it is not looked for again: what compiles a program reads its text (compiled.py)
            linecache.cache[package.model.__file__] = len(text), None, text.splitlines(keepends=True), str(target)
            return package.build(device=device, dtype=dtype)  # type: ignore[no-any-return]

    def _save(self) -> dict[str, Any]:
        """The document without how long planning took, so that equal plans are equal bytes (docs/decisions)."""
        return {**self.document, "search": {**self.document["search"], "seconds": None}}


def _move(built: Path, target: Path, *, aside: Path) -> None:
    """Put a package where it belongs; what was there stays if that fails."""
    if not target.exists():
        built.rename(target)
        return
    target.rename(aside)
    try:
        built.rename(target)
    except BaseException:
        aside.rename(target)
        raise


def read_document(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """plan.json of a package.

    Raises:
        UsageError: if there is none.
        VerificationError: if it is not as it was written.
    """
    path = Path(directory) / DOCUMENT
    if not path.is_file():
        missing = f"has no {DOCUMENT}" if Path(directory).is_dir() else "is no directory"
        raise UsageError(f"{directory} {missing}", "A package that `pdv optimize` wrote", "Check the path")
    return parse_document(read_text(path, PLAN))


def check_target(target: Path, *, overwrite: bool) -> None:
    """Whether a package may be written here: replaced is only what is one.

    Raises:
        UsageError: saying what stands there, or around it.
    """
    check_outside_packages(target)
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target} is a file", "A directory to make", "Choose another output")
    empty = not any(target.iterdir())
    if empty or (overwrite and (target / DOCUMENT).is_file()):
        return
    mend = "Choose another output" if overwrite else "Choose another output, or overwrite it (--overwrite)"
    raise UsageError(f"{target} exists and is not empty", "A new directory, or a package to overwrite", mend)


def package_name(text: str) -> str:
    """A name that Python can import, from any text."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower() or "model"
    return f"{'m_' if name[0].isdigit() else ''}{name}_pdv"


def import_package(directory: Path) -> Any:  # Any: a module made at run time
    """Import a saved package from where it lies; one that was written in the place of another is not taken for it."""
    texts = tuple((path.name, path.read_bytes()) for path in sorted(directory.glob("*.py")))
    name = f"_pdv_package_{abs(hash((str(directory), texts)))}"
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
