"""onnx's own backend node tests, each read, planned, proved, written, and its text run on simulated ranks.

Entry points: ``cases``, ``survey``.
"""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

import pdv
from benchmarks.coverage_runs import SLOW
from ir.errors import PdvError, UnsupportedOperatorsError
from pdv.check.imports import Texts
from pdv.check.reference import Given
from pdv.check.run import observe
from pdv.check.small import full_pair
from pdv.emit.emission import module_texts, shapes_in
from pdv.plan.package import Plan

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
COMMON = FLOATS | {getattr(onnx.TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
COMMON |= {onnx.TensorProto.BOOL}
TIME_OUT_S = 60

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans
LINK = {"name": "wire", "bandwidth": "10 GB/s", "latency": "1 us"}
"""So slow a device, and so fast a link, that cutting pays for tensors of twelve elements."""


@dataclass(frozen=True)
class Case:
    """One test: a model of one node or its function's body, inputs, and the outputs that it asks for."""

    name: str
    model: onnx.ModelProto
    data: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float

    @property
    def expanded(self) -> bool:
        """True of a test of a function's body."""
        return "_expanded" in self.name

    @property
    def operator(self) -> str:
        """What the test is of, as its first node says."""
        return "+".join(sorted({node.op_type for node in self.model.graph.node})) if not self.expanded else "a function"

    @property
    def is_float(self) -> bool:
        """Standard operators over tensors of floats, integers and truth values, some of them floats."""
        values = [*self.model.graph.input, *self.model.graph.output]
        kinds = {value.type.tensor_type.elem_type for value in values if value.type.HasField("tensor_type")}
        plain = all(value.type.HasField("tensor_type") for value in values)
        standard = all(node.domain in ("", "ai.onnx") for node in self.model.graph.node)
        return plain and standard and kinds <= COMMON and bool(kinds & FLOATS)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: passed, refused, wrong, crashed or timed out; and why, in a line; whether it was cut."""

    what: str
    why: str = ""
    cut: bool = False


def cases() -> list[Case]:
    """All of them, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        found = load_model_tests(kind="node")
    return sorted((Case(t.name, t.model, t.data_sets or [], t.rtol, t.atol) for t in found), key=lambda case: case.name)


def run_case(case: Case, devices: int) -> Outcome:
    """One case planned for so many devices, and its text run on as many simulated ranks."""
    try:
        with warnings.catch_warnings(), _time_out(TIME_OUT_S), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            path = Path(folder) / "model.onnx"
            onnx.save(case.model, path)
            for inputs, wanted in case.data:
                plan, known = _plan(case, path, inputs, devices)
                cut = _is_cut(plan)
                why = _differs(case, plan, _named(case, inputs, known), wanted)
                if why:
                    return Outcome("wrong", why, cut)
            return Outcome("passed", "", cut)
    except TimeoutError:
        return Outcome("timed out")
    except PdvError as error:
        kind = "crashed" if error.slug == "internal-error" else "refused"
        return Outcome("crashed" if error.slug == "verification-failed" else kind, f"{error.slug}: {error.what}")
    except Exception as error:  # noqa: BLE001  # that is what is looked for
        return Outcome("crashed", f"{type(error).__name__}: {error}")


def _plan(case: Case, path: Path, inputs: Sequence[Any], devices: int) -> tuple[Plan, set[str]]:
    """The plan, and the inputs that had to be known for it: shapes, axes, and the like."""
    cluster = {"name": "two", "nodes": [{"count": 1, "devices": devices, "device": SLOW, "link": LINK}]}
    given: Mapping[str, Any] = {value.name: x for value, x in zip(case.model.graph.input, inputs, strict=False)}
    known = {name: [] for name, x in given.items() if isinstance(x, np.ndarray) and not x.size}  # lists of axes
    while True:
        try:
            plan = pdv.optimize(path, cluster=cluster, mode="infer", mesh={"x": devices}, dims=known, budget_s=20)
        except UnsupportedOperatorsError as error:
            asked = [
                name
                for name in error.inputs
                if name not in known and isinstance(given.get(name), np.ndarray | np.generic)
            ]
            left = [name for name, x in given.items() if name not in {*known, *asked} and np.asarray(x).size]
            if not asked or not left:  # nothing would be left to run
                raise
            known |= {name: given[name].tolist() for name in asked}
        else:
            return plan, set(known)


def _named(case: Case, inputs: Sequence[Any], known: set[str]) -> dict[str, Array]:
    named = {value.name: x for value, x in zip(case.model.graph.input, inputs, strict=False)}
    return {name: _plain(x) for name, x in named.items() if name not in known}


def _is_cut(plan: Plan) -> bool:
    """Whether some value of the program lies in parts on the devices."""
    return any(node.op.kind == "parallel" and node.op.name == "partition" for node in plan.pcg.nodes)


def _differs(case: Case, plan: Plan, inputs: Mapping[str, Array], wanted: Sequence[Any]) -> str:
    """How what the text gives differs from what the test asks for; nothing if it does not."""
    emission, shape_of = plan.emission, shapes_in(plan.weights)
    pair = full_pair(plan.source, emission, shape_of)
    stored = {name: plan.weights.load(name) for name in plan.weights.names}
    texts = Texts(module_texts(emission.body(shape_of)), Path("emitted"))
    names = {node.attr("name") for node in plan.source.inputs}
    given = Given({name: _wide(x) for name, x in inputs.items() if name in names}, {}, {}, np.ones(1))
    wide = {name: _wide(x) for name, x in stored.items()}
    ranks = observe(pair, texts, {**wide, **pair.own_tensors(wide)}, given, train=False)
    from pdv.check.compare import own_rows

    for rank, (observed, _) in enumerate(ranks):
        if len(observed.outputs) != len(wanted):
            return f"{len(observed.outputs)} outputs, not {len(wanted)}"
        for index, (found, want, (_, node)) in enumerate(
            zip(observed.outputs, map(_plain, wanted), plan.source.outputs, strict=True)
        ):
            if node.type.dtype.torch_name != want.dtype.name.replace("bool_", "bool"):
                return f"output {index} is {node.type.dtype.torch_name}, not {want.dtype.name}"
            if node.type.shape != want.shape:
                return f"output {index} is of shape {list(node.type.shape)}, not {list(want.shape)}"
            part = own_rows(_wide(want), observed.batch_axes)
            if found.shape != part.shape:
                return f"output {index} on rank {rank} is of shape {list(found.shape)}, not {list(part.shape)}"
            if not np.allclose(found, part, rtol=max(case.rtol, _resolution(want)), atol=case.atol, equal_nan=True):
                gap = float(np.nanmax(np.abs(np.subtract(found, part, dtype=np.float64)), initial=0.0))
                return f"output {index} on rank {rank} differs by {gap:.1e}"
    return ""


def _resolution(want: Array) -> float:
    """Two steps of the type that a test's numbers were rounded to: what is run here is the text in float64."""
    return 2 * float(ml_dtypes.finfo(want.dtype).eps) if want.dtype.itemsize == 2 and want.dtype.kind in "fV" else 0.0


def _wide(x: Any) -> Array:
    x = _plain(x)
    return x if x.dtype.kind in "iub" else x.astype(np.float64)


def _plain(x: Any) -> Array:
    return np.asarray(onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x)


@contextlib.contextmanager
def _time_out(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


GROUPS = ("direct, floats", "direct, others", "functions' bodies")
WORST_FIRST = ("crashed", "wrong", "timed out", "refused", "passed")


def group_of(case: Case) -> str:
    """Which share a case counts to."""
    return GROUPS[2] if case.expanded else GROUPS[0] if case.is_float else GROUPS[1]


def survey(chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row for each case: what came of it on one process and cut over two, the worse of both first."""
    for case in chosen:
        one = run_case(case, 1)
        two = one if one.what == "refused" else run_case(case, 2)
        worse = min(one, two, key=lambda outcome: WORST_FIRST.index(outcome.what))
        yield {
            "test": case.name,
            "operator": case.operator,
            "group": group_of(case),
            "outcome": worse.what,
            "why": _short(worse.why),
            "cut": two.cut,
        }


def _short(why: str) -> str:
    """A reason without what differs from run to run."""
    return re.sub(r"/tmp/\S*/", "", why).replace("unsupported-operators: unsupported operators ", "")[:160]


def refusals(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """What is refused of the standard operators over floats: how many tests, of which operator, why first."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["group"] == GROUPS[0] and row["outcome"] == "refused":
            found.setdefault(row["operator"], []).append(row["why"])
    ordered = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    return [(str(len(whys)), operator, min(whys)) for operator, whys in ordered]
