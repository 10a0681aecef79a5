"""Small ONNX models and the outputs that they should give: read, planned, proved, written, and the text run on
simulated ranks.

Entry points: ``run_case``, ``read_case``; ``run_safely``, with what a run is made of.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx

import pdv
from ir.errors import PdvError, UnsupportedOperatorsError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from ir.graph import Node
from pdv.check.compare import Observed, own_rows
from pdv.check.imports import Texts
from pdv.check.reference import Given
from pdv.check.run import observe
from pdv.check.small import full_pair
from pdv.config import Mode
from pdv.emit.emission import module_texts, shapes_in
from pdv.frontend.load import load_program
from pdv.frontend.torch.opaque import call_torch
from pdv.plan.package import Plan

TIME_OUT_S = 60  # of CPU time, for a case
DRAWS = 100  # of masks, whose share of zeros is compared
SLOW = {
    "name": "slow",
    "memory": "1 GiB",
    "peak": {"float32": "100 MFLOP/s"},
    "memory_bandwidth": "1 GB/s",
    "launch_latency": "10 ns",
    "efficiency": 0.02,
}
LINK = {"name": "wire", "bandwidth": "1 GB/s", "latency": "10 ns"}
"""So slow a device, and so fast a link, that cutting pays for tensors of two elements."""

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans
T = TypeVar("T")
Names = set[str]


@dataclass(frozen=True)
class Case:
    """A model, inputs, and the outputs that it asks for, within tolerances."""

    name: str
    model: onnx.ModelProto
    data: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Outcome:
    """What came of a case: passed, refused, wrong, crashed or timed out; and why, in a line; whether it was cut."""

    what: str
    why: str = ""
    cut: bool = False


WORST_FIRST = ("crashed", "wrong", "timed out", "refused", "passed")


def run_case(case: Case, devices: int, mode: Mode = "infer") -> Outcome:
    """One case planned for so many devices, and its text run on as many simulated ranks."""

    def run(path: Path, inputs: Sequence[Any], wanted: Sequence[Any]) -> tuple[str, bool]:
        plan, known = find_known(case, inputs, lambda known: plan_case(path, devices, known, mode))
        return _text_differs(case, plan, name_inputs(case, inputs, known), wanted), is_cut(plan)

    return run_safely(case, run)


def read_case(case: Case) -> Outcome:
    """One case read, and what was read of it evaluated in NumPy: quick, for a census.

    Where that differs, rounding may be why, and the case is planned and run for one process.
    """

    def run(path: Path, inputs: Sequence[Any], wanted: Sequence[Any]) -> tuple[str, bool]:
        program, known = find_known(case, inputs, lambda known: load_program(path, dims=known))
        stored = {name: program.weights.load(name) for name in program.weights.names}
        given = {**stored, **name_inputs(case, inputs, known)}
        with np.errstate(all="ignore"):
            wide = {name: widen(x) for name, x in given.items()}
            found = evaluate(program.graph, wide, field=FloatField(foreign=call_torch)).gather()
        nodes = [node for _, node in program.graph.outputs]
        return _differs(case, nodes, [found[name] for name, _ in program.graph.outputs], wanted), False

    found = run_safely(case, run)
    return run_case(case, 1) if found.what == "wrong" else found


def run_safely(case: Case, run: Callable[[Path, Sequence[Any], Sequence[Any]], tuple[str, bool]]) -> Outcome:
    """run: (the model's file, inputs, outputs) -> what is wrong, and whether it was cut."""
    cut = False
    try:
        with warnings.catch_warnings(), _time_out(TIME_OUT_S), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            path = Path(folder) / "model.onnx"
            onnx.save(case.model, path)
            for inputs, wanted in case.data:
                why, cut = run(path, inputs, wanted)
                if why:
                    return Outcome("wrong", why, cut)
            return Outcome("passed", "", cut)
    except TimeoutError:
        return Outcome("timed out")
    except PdvError as error:
        broken = error.slug in ("internal-error", "verification-failed")
        return Outcome("crashed" if broken else "refused", _short(f"{error.slug}: {error.what}"))
    except Exception as error:  # noqa: BLE001  # that is what is looked for
        return Outcome("crashed", _short(f"{type(error).__name__}: {error}"))


def _short(why: str) -> str:
    """A reason without what differs from run to run."""
    return re.sub(r"/tmp/\S*/", "", why).replace("unsupported-operators: unsupported operators ", "")[:240]


def plan_case(path: Path, devices: int, known: Mapping[str, Any], mode: Mode) -> Plan:
    """The plan of a file for so many devices; known: values of inputs."""
    cluster = {"name": "two", "nodes": [{"count": 1, "devices": devices, "device": SLOW, "link": LINK}]}
    return pdv.optimize(path, cluster=cluster, mode=mode, mesh={"x": devices}, dims=known, budget_s=20)


def find_known(case: Case, inputs: Sequence[Any], read: Callable[[Mapping[str, Any]], T]) -> tuple[T, Names]:
    """What ``read`` gives, and the inputs whose values it had to know: shapes, axes, and the like."""
    given: Mapping[str, Any] = {value.name: x for value, x in zip(case.model.graph.input, inputs, strict=False)}
    known: dict[str, Any] = {}
    while True:
        try:
            return read(known), set(known)
        except UnsupportedOperatorsError as error:
            asked = [
                name
                for name in error.inputs
                if name not in known and isinstance(given.get(name), np.ndarray | np.generic)
            ]
            if not asked:
                raise
            known |= {name: given[name].tolist() for name in asked}


def name_inputs(case: Case, inputs: Sequence[Any], known: Names) -> dict[str, Array]:
    """Inputs by name, without those that are known."""
    named = {value.name: x for value, x in zip(case.model.graph.input, inputs, strict=False)}
    return {name: plain(x) for name, x in named.items() if name not in known}


def is_cut(plan: Plan) -> bool:
    """Whether some value of the program lies in parts on the devices."""
    return any(node.op.kind == "parallel" and node.op.name == "partition" for node in plan.pcg.nodes)


def _text_differs(case: Case, plan: Plan, inputs: Mapping[str, Array], wanted: Sequence[Any]) -> str:
    """How what the text gives differs from what the case asks for; nothing if it does not."""
    emission, shape_of = plan.emission, shapes_in(plan.weights)
    pair = full_pair(plan.source, emission, shape_of)
    stored = {name: plan.weights.load(name) for name in plan.weights.names}
    texts = Texts(module_texts(emission.body(shape_of)), Path("emitted"))
    names = {node.attr("name") for node in plan.source.inputs}
    given = Given({name: widen(x) for name, x in inputs.items() if name in names}, {}, {}, np.ones(1))
    wide = {name: widen(x) for name, x in stored.items()}
    ranks = [first for first, _ in observe(pair, texts, {**wide, **pair.own_tensors(wide)}, given, train=False)]
    drawn = bool(plan.source.draws)
    why = "" if drawn else _any_differs(case, plan, ranks, wanted)
    if drawn or why:
        with np.errstate(all="ignore"):
            values = evaluate(plan.source, {**given.inputs, **wide}, field=FloatField(foreign=call_torch)).gather()
        exact = [values[name] for name, _ in plan.source.outputs]
        if differs := _any_differs(case, plan, ranks, exact, typed=False):
            return why or differs
        why = (_drawn_differs if drawn else _differs_in_own_types)(case, plan, inputs, wanted)
    return why


def _any_differs(
    case: Case, plan: Plan, ranks: Sequence[Observed], wanted: Sequence[Any], *, typed: bool = True
) -> str:
    nodes = [node for _, node in plan.source.outputs]
    for rank, observed in enumerate(ranks):
        own = [own_rows(plain(want), observed.batch_axes) for want in wanted]
        if why := _differs(case, nodes, observed.outputs, wanted, own, typed=typed):
            return f"{why} (rank {rank})"
    return ""


def _differs_in_own_types(case: Case, plan: Plan, inputs: Mapping[str, Array], wanted: Sequence[Any]) -> str:
    """The same of the text on one process, in the model's own types: where rounding decides what comes out."""
    nodes = [node for _, node in plan.source.outputs]
    return _differs(case, nodes, next(_runs(plan, inputs)), wanted)


def _drawn_differs(case: Case, plan: Plan, inputs: Mapping[str, Array], wanted: Sequence[Any]) -> str:
    """The same where masks of dropout are drawn: kept elements are those of the test, as many are dropped as should be.

    The first output is what was dropped out, and further ones are masks. Of noise only shapes are those of the test.
    """
    if any(node.op.draws and "p" not in node.attrs for node in plan.source.nodes):
        pairs = zip(next(_runs(plan, inputs)), wanted, strict=True)
        return "" if all(x.shape == plain(y).shape for x, y in pairs) else "noise has another shape"
    shares = [node.attr("p") for node in plan.source.nodes if node.op.draws]
    nodes = [node for _, node in plan.source.outputs]
    want = widen(wanted[0])
    kept = []
    for found in itertools.islice(_runs(plan, inputs), DRAWS):
        mask = np.logical_and(found[0] != 0, want != 0)
        held = [np.where(mask, found[0], want), *(x | ~mask | (want == 0) for x in found[1:])]
        asked = [wanted[0], *(np.ones_like(plain(x)) for x in wanted[1:])]
        if why := _differs(case, nodes, held, asked):
            return why
        kept.append(found[0] != 0)
    rate, share = 1 - float(np.mean(kept)), math.prod(1 - p for p in shares)
    spread = math.sqrt(share * (1 - share) / np.size(kept))
    return "" if abs(1 - rate - share) <= 5 * spread else f"{rate:.3f} of the elements are dropped, not {1 - share:.3f}"


def _runs(plan: Plan, inputs: Mapping[str, Array]) -> Iterator[list[Array]]:
    """What the text on one process gives in the model's own types, again and again."""
    import torch

    names = [node.attr("name") for node in plan.source.inputs]
    model = plan.build("cpu")
    while True:
        with torch.no_grad():
            found = model(*(_tensor(inputs[name]) for name in names))
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
        yield [(x.double() if x.is_floating_point() else x).numpy() for x in outputs]


def _tensor(x: Array) -> Any:  # Any: a tensor of torch, which is imported late
    import torch

    own = getattr(torch, x.dtype.name)
    return torch.from_numpy(widen(x)).to(own) if x.dtype.kind in "fV" else torch.from_numpy(np.array(x))


def _differs(
    case: Case,
    nodes: Sequence[Node],
    found: Sequence[Array],
    wanted: Sequence[Any],
    own: Sequence[Any] | None = None,
    *,
    typed: bool = True,
) -> str:
    """How outputs differ from what is asked for; own: the part of it that is to be found here; typed: and its type."""
    if len(found) != len(wanted):
        return f"{len(found)} outputs, not {len(wanted)}"
    rows = zip(found, map(plain, wanted), map(plain, own or wanted), nodes, strict=True)
    for index, (value, want, part, node) in enumerate(rows):
        if typed and node.type.dtype.torch_name != want.dtype.name.replace("bool_", "bool"):
            return f"output {index} is {node.type.dtype.torch_name}, not {want.dtype.name}"
        if node.type.shape != want.shape:
            return f"output {index} is of shape {list(node.type.shape)}, not {list(want.shape)}"
        if value.shape != part.shape:
            return f"output {index} is of shape {list(value.shape)}, not {list(part.shape)}"
        close = {"rtol": max(case.rtol, _resolution(want)), "atol": max(case.atol, _step(want)), "equal_nan": True}
        if not np.allclose(value, widen(part), **close):  # type: ignore[arg-type]
            gap = float(np.nanmax(np.abs(np.subtract(value, widen(part), dtype=np.float64)), initial=0.0))
            return f"output {index} differs by {gap:.1e}"
    return ""


def _resolution(want: Array) -> float:
    """Two steps of the type that a test's numbers were rounded to: what is run here is the text in float64."""
    return 2 * float(ml_dtypes.finfo(want.dtype).eps) if want.dtype.itemsize == 2 and want.dtype.kind in "fV" else 0.0


def _step(want: Array) -> float:
    """Two steps of float32 at the largest element, for what is zero but for rounding."""
    if want.dtype != np.float32:
        return 0.0
    finite = np.abs(want[np.isfinite(want)])
    return 2 * float(np.finfo(np.float32).eps) * float(finite.max(initial=0.0))


def widen(x: Any) -> Array:  # Any: whatever a test's values are
    """Floats in float64, others as they are."""
    x = plain(x)
    return x if x.dtype.kind in "iub" else x.astype(np.float64)


def plain(x: Any) -> Array:  # Any: whatever a test's values are
    """An array of a tensor of ONNX, or of what is one."""
    return np.asarray(onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x)


@contextlib.contextmanager
def _time_out(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
