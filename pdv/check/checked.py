"""The emitted text against its source: run on simulated ranks at small sizes.

Where equal layers repeat, few of them are run, by the same loop. Independent of the proof: another evaluator (torch),
another arithmetic (float64), and the text in place of the graph.
Entry points: ``check_text``, ``check_package``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ir.depth import shorten
from ir.dims import Shape
from ir.errors import VerificationError
from ir.graph import Graph
from ir.mesh import Mesh
from pdv.check.compare import TOLERANCE
from pdv.check.emission import Emission, ShapeOf, stored_shapes
from pdv.check.fewer import renumbered
from pdv.check.imports import Texts
from pdv.check.reference import NotFiniteError
from pdv.check.run import run, tensors_read
from pdv.check.small import Pair, full_pair, small_pair
from pdv.check.text import at_sizes, tokens
from pdv.emit.constants import STORED, constant_names
from pdv.emit.leaves import Reading
from pdv.emit.package import module_texts
from pdv.frontend.program import Weights

MOST_RANKS = 16
MOST_ELEMENTS = 1 << 26  # of all values on all ranks and of the source: some 1.5 GiB and 15 seconds
KEPT = 3  # of equal layers, so that the text still has a loop over them
FEW_ELEMENTS = 1 << 20  # a program that is so small is run at its own sizes


@dataclass(frozen=True)
class Checked:
    """What a run of the emitted text showed.

    Attributes:
        ran: False if it was too large to be run, even at small sizes.
        ranks: how many were simulated.
        sizes: at which sizes, in words; or why it was not run.
        largest_error: the largest relative difference from the source.
        seconds: it took.
    """

    ran: bool
    ranks: int
    sizes: str
    largest_error: float
    seconds: float
    gradients: bool = True

    @property
    def statement(self) -> str:
        """What people read; how long it took is left out, so that equal plans read the same."""
        if not self.ran:
            return f"the emitted text was not run: {self.sizes}"
        compared = "outputs, gradients and buffers" if self.gradients else "outputs"
        return (
            f"the emitted text was run on {self.ranks} simulated ranks in float64 at {self.sizes}: "
            f"{compared} within {TOLERANCE:.0e} of the source's"
        )


def check_text(
    source: Graph,
    pcg: Graph,
    mesh: Mesh,
    weights: Weights,
    *,
    train: bool = True,
    document: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
    directory: Path = Path("emitted"),
) -> Checked:
    """Run the text that is emitted of a PCG, or ``files`` that were made of it, and compare with the source.

    Args:
        source: the serial program.
        pcg: what was emitted.
        mesh: its mesh.
        weights: the source's; none is read but to learn the shape of what a view reshapes.
        train: compare gradients and buffers too.
        document: plan.json, of which the text says some things.
        files: the modules of the package; by default as they are emitted.
        directory: what messages name.

    Raises:
        VerificationError: if the text does not run, or gives something else than the source.
    """
    started = time.perf_counter()
    emission, shape_of = Emission.of(pcg, mesh, document, train=train), _shape_of(weights)
    modules = module_texts(emission.text(shape_of)) if files is None else files
    model = modules["model.py"]
    chosen = _at_full_size(source, emission, shape_of, model, FEW_ELEMENTS)
    if chosen is None and model == emission.text(shape_of):  # an edit may tell layers apart
        chosen = _at_few_layers(source, pcg, mesh, emission, shape_of, train=train)
        if chosen is not None:
            _check_all_read(emission, shape_of, Texts(modules, directory))
    found = chosen or _at_small_sizes(source, emission, shape_of, model)
    if isinstance(found, str):
        return Checked(False, 0, found, 0.0, time.perf_counter() - started, train)
    pair, small_model = found
    try:
        error = run(pair, Texts({**modules, "model.py": small_model}, directory), train=train)
    except NotFiniteError:
        reason = "on random values the source gives infinities, no numbers, or a choice between equals"
        return Checked(False, 0, reason, 0.0, time.perf_counter() - started, train)
    return Checked(True, pair.mesh.num_devices, pair.note, error, time.perf_counter() - started, train)


def check_package(
    directory: Path,
    source: Graph,
    pcg: Graph,
    mesh: Mesh,
    *,
    train: bool = True,
    document: Mapping[str, object] | None = None,
    allow_edits: bool = False,
) -> Checked:
    """The same of a package on disk, whose modules are run only if they are what is emitted, or edits are allowed.

    Raises:
        VerificationError: as ``check_text``; if a file was edited and none may be; if what was edited cannot be run.
    """
    weights = _stored_in(directory / "weights.safetensors")
    emitted = module_texts(Emission.of(pcg, mesh, document, train=train).text(_shape_of(weights)))
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.py"))}
    missing = sorted(set(emitted) - set(files))
    if missing:
        raise VerificationError(f"{directory} has no {', '.join(missing)}", "", "Plan again", check="text")
    edited = sorted(name for name, text in files.items() if not _same(text, emitted.get(name)))
    if edited and not allow_edits:
        raise VerificationError(
            f"{', '.join(str(directory / name) for name in edited)} is not what the plan emits",
            "Only what was emitted is run",
            "Allow edits (--allow-edits), or plan again",
            check="text",
        )
    checked = check_text(source, pcg, mesh, weights, train=train, document=document, files=files, directory=directory)
    if edited and not checked.ran:
        raise VerificationError(
            f"{', '.join(edited)} was edited, and cannot be checked: {checked.sizes}",
            "Edits of programs that can be run",
            "Check by running it against the source model",
            check="text",
        )
    return checked


def _same(text: str, emitted: str | None) -> bool:
    """Whether two texts are the same program."""
    if emitted is None or text == emitted:
        return emitted is not None
    return [token.text for token in tokens(text)] == [token.text for token in tokens(emitted)]


def _at_full_size(
    source: Graph, emission: Emission, shape_of: ShapeOf, model: str, most: int
) -> tuple[Pair, str] | None:
    """The programs and the text of model.py as they are, if that takes no more than ``most`` elements."""
    ranks = emission.mesh.num_devices
    if ranks > MOST_RANKS or sum(node.type.num_elements for node in emission.graph.nodes) * ranks > most:
        return None
    here = full_pair(source, emission, shape_of)
    return (here, model) if here.elements <= most else None


def _at_few_layers(
    source: Graph, pcg: Graph, mesh: Mesh, emission: Emission, shape_of: ShapeOf, *, train: bool
) -> tuple[Pair, str] | None:
    """The programs with fewer of their equal layers, at small sizes, and the text, if theirs has its structure."""
    short = shorten(source, pcg, mesh, KEPT)
    if not short.note:
        return None
    old_names, (fewer_source, fewer_pcg) = renumbered(source, short.source, short.pcg)
    fewer = Emission.of(fewer_pcg, mesh, emission.document, train=train)

    def shape_of_kept(name: str) -> Shape:
        return shape_of(old_names[name])

    try:
        pair = small_pair(fewer_source, fewer, shape_of_kept)
    except VerificationError:
        return None
    if not _may_run(pair):
        return None
    model = emission.text(shape_of)
    text = at_sizes(model, model, pair.text(fewer.items(shape_of_kept), fewer.document))
    return None if text is None else (replace(pair, note=f"{pair.note}, {short.note}"), text)


def _check_all_read(emission: Emission, shape_of: ShapeOf, texts: Texts) -> None:
    """The text at its own sizes builds a model of all layers: of all stored tensors, and no others.

    Raises:
        VerificationError: naming one that is not read.
    """
    shapes = stored_shapes(emission.graph, shape_of)
    shapes |= {STORED + name: node.type.shape for node, name in constant_names(Reading(emission.graph)).items()}
    missing = sorted(set(shapes) - tensors_read(texts, emission.mesh.num_devices, shapes))
    if missing:
        raise VerificationError(f"the emitted text never reads {', '.join(missing)}", check="text")


def _at_small_sizes(source: Graph, emission: Emission, shape_of: ShapeOf, model: str) -> tuple[Pair, str] | str:
    """The programs to run and the text of model.py for their sizes; or why there are none."""
    try:
        small = small_pair(source, emission, shape_of)
    except VerificationError as error:
        return error.what
    if not _may_run(small):
        return f"at {small.note} it takes {small.elements:.1e} elements on {small.mesh.num_devices} ranks"
    text = at_sizes(model, emission.text(shape_of), small.text(emission.items(shape_of), emission.document))
    if text is not None:
        return small, text
    here = _at_full_size(source, emission, shape_of, model, MOST_ELEMENTS)
    return here or "its text has another structure at small sizes"


def _may_run(pair: Pair) -> bool:
    return pair.mesh.num_devices <= MOST_RANKS and pair.elements <= MOST_ELEMENTS


def _shape_of(weights: Weights) -> ShapeOf:
    return lambda source: tuple(weights.load(source).shape)


def _stored_in(path: Path) -> Weights:
    """The tensors of a safetensors file, read when asked for."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(str(path), framework="numpy")  # Any: safetensors ships no types
        return Weights({name: partial(file.get_tensor, name) for name in file.keys()})  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise VerificationError(f"{path} cannot be read: {error}", "", "Plan again", check="text") from error
