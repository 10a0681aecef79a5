"""The emitted text against its source: run on simulated ranks at small sizes.

Where equal layers repeat, few of them are run, by the same loop. Independent of the proof: another evaluator (torch),
another arithmetic (float64), and the text in place of the graph.
Entry point: ``check_text``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ir.dims import Shape
from ir.errors import VerificationError
from ir.graph import Graph
from ir.proof.depth import shorten
from pdv.check.compare import TOLERANCE
from pdv.check.edits.beside import check_edits
from pdv.check.fewer import renumber
from pdv.check.imports import Texts
from pdv.check.reference import NotFiniteError
from pdv.check.run import run, tensors_read
from pdv.check.small import Pair, full_pair, small_pair
from pdv.check.text import at_sizes
from pdv.emit.analysis.constants import STORED, constant_names
from pdv.emit.analysis.leaves import Reading
from pdv.emit.emission import Emission, ShapeOf, module_texts, shapes_in, stored_shapes
from pdv.frontend.program import Weights
from pdv.frontend.torch.opaque import OutOfBoundsError

MOST_RANKS = 16
MOST_ELEMENTS = 1 << 26  # of all values on all ranks and of the source: some 1.5 GiB and 15 seconds
_NOT_FINITE = "on random values the source gives infinities, no numbers, or a choice between equals"
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
    emission: Emission,
    weights: Weights,
    *,
    files: Mapping[str, str] | None = None,
    directory: Path = Path("emitted"),
    most: int | None = None,
) -> Checked:
    """Run the text emitted of a PCG, or ``files`` made of it; compare outputs, and in training gradients and buffers.

    Args:
        source: the serial program.
        emission: of its PCG.
        weights: the source's; none is read but to learn the shape of what a view reshapes.
        files: the modules of the package; by default as they are emitted.
        directory: what messages name.
        most: elements of a program that is run at its own sizes; by default few.

    Raises:
        VerificationError: if the text does not run, or gives something else than the source.
    """
    started, shape_of, train = time.perf_counter(), shapes_in(weights), emission.train
    modules = module_texts(emission.body(shape_of)) if files is None else files
    model = modules["model.py"]
    emission = emission.at_once  # of slices in time a call of the model has one
    chosen = _at_full_size(source, emission, shape_of, model, FEW_ELEMENTS if most is None else most)
    if chosen is None and model == emission.body(shape_of):  # an edit may tell layers apart
        chosen = _at_few_layers(source, emission, shape_of)
        if chosen is not None:
            _check_all_read(emission, shape_of, Texts(modules, directory))
    found = chosen or _at_small_sizes(source, emission, shape_of, model)
    if isinstance(found, str):
        return Checked(False, 0, found, 0.0, time.perf_counter() - started, train)
    pair, small_model = found
    try:
        edited = Texts({**modules, "model.py": small_model}, directory)
        error = run(pair, edited, train=train)
        if files is not None:
            emitted = small_model if model == emission.body(shape_of) else _emitted(pair, emission, shape_of)
            check_edits(pair, Texts(module_texts(emitted), Path("emitted")), edited, train=train)
            if pair.note != "full size":  # numbers of an edit are of the program's own sizes
                _run_at_full_size(_at_full_size(source, emission, shape_of, model, MOST_ELEMENTS), edited, train=train)
    except OutOfBoundsError:  # of lengths, which are counts of elements, of which small sizes have fewer
        if most is not None or pair.note == "full size":
            raise
        return check_text(source, emission, weights, files=files, directory=directory, most=MOST_ELEMENTS)
    except NotFiniteError:
        return Checked(False, 0, _NOT_FINITE, 0.0, time.perf_counter() - started, train)
    return Checked(True, pair.mesh.num_devices, pair.note, error, time.perf_counter() - started, train)


def _run_at_full_size(found: tuple[Pair, str] | None, texts: Texts, *, train: bool) -> None:
    if found is not None:
        pair, model = found
        with suppress(NotFiniteError):
            run(pair, Texts({**texts.files, "model.py": model}, texts.directory), train=train)


def _emitted(pair: Pair, emission: Emission, shape_of: ShapeOf) -> str:
    """model.py as it is emitted, at the sizes of a pair."""
    body = emission.body(shape_of)
    small = None if pair.note == "full size" else at_sizes(body, body, pair.text(emission, shape_of))
    return small or body


def _at_full_size(
    source: Graph, emission: Emission, shape_of: ShapeOf, model: str, most: int
) -> tuple[Pair, str] | None:
    """The programs and the text of model.py as they are, if that takes no more than ``most`` elements."""
    ranks = emission.mesh.num_devices
    if ranks > MOST_RANKS or sum(node.type.num_elements for node in emission.graph.nodes) * ranks > most:
        return None
    here = full_pair(source, emission, shape_of)
    return (here, model) if here.elements <= most else None


def _at_few_layers(source: Graph, emission: Emission, shape_of: ShapeOf) -> tuple[Pair, str] | None:
    """The programs with fewer of their equal layers, at small sizes, and the text, if theirs has its structure."""
    if emission.running.stages > 1:
        return None  # which layers a stage has is part of the text
    short = shorten(source, emission.pcg, emission.pcg_mesh, KEPT)
    if not short.note:
        return None
    old_names, (fewer_source, fewer_pcg) = renumber(source, short.source, short.pcg)
    fewer = emission.alike_of(fewer_pcg)

    def shape_of_kept(name: str) -> Shape:
        return shape_of(old_names[name])

    try:
        pair = small_pair(fewer_source, fewer, shape_of_kept)
    except VerificationError:
        return None
    if not _may_run(pair):
        return None
    model = emission.body(shape_of)
    text = at_sizes(model, model, pair.text(fewer, shape_of_kept))
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
    text = at_sizes(model, emission.body(shape_of), small.text(emission, shape_of))
    if text is not None:
        return small, text
    here = _at_full_size(source, emission, shape_of, model, MOST_ELEMENTS)
    return here or "its text has another structure at small sizes"


def _may_run(pair: Pair) -> bool:
    return pair.mesh.num_devices <= MOST_RANKS and pair.elements <= MOST_ELEMENTS
