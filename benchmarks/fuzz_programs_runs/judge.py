"""The way of one program: planned, proved, emitted, run, compared. Entry point: ``Judge``."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.fuzz_programs_runs.assignment import assigned, problem_of
from benchmarks.fuzz_programs_runs.module import Module
from benchmarks.fuzz_programs_runs.observe import (
    Data,
    Step,
    data_of,
    differences,
    observe_module,
    observe_package,
    says_fixed,
)
from benchmarks.fuzz_programs_runs.running import micro_graph, run_as
from benchmarks.fuzz_programs_runs.spec import ModuleSpec, PlanSpec, RunSpec
from ir.errors import PdvError, VerificationError
from ir.graph import Graph
from ir.proof.exact import verify_equal
from pdv.check import Checked, check_text
from pdv.emit.analysis.staged import Running
from pdv.emit.emission import Emission
from pdv.emit.package import emission_of, write_package
from pdv.frontend.program import Program as Loaded

Outcome = Literal["equal", "refused", "wrong", "crash"]
Progress = Callable[[str], None]

SEARCH_S = 20.0  # CPU-seconds of a search, whose best plan so far is then judged


@dataclass(frozen=True)
class Verdict:
    """What became of a program; ``stage`` and ``kind`` say in which way it failed, ``text`` in full.

    ``twice``: whether it ran at twice the batch ("equal") or says that its batch is fixed ("fixed").
    """

    outcome: Outcome
    stage: str = ""
    kind: str = ""
    text: str = ""
    twice: str = ""
    ranks: int = 1

    @property
    def signature(self) -> tuple[str, str, str]:
        """Failures of one signature are taken for one mistake."""
        return self.outcome, self.stage, self.kind

    @property
    def failed(self) -> bool:
        """Whether somebody should look at it: a refused program is legal, too."""
        return self.outcome != "equal"


def silent(stage: str) -> None:
    """Nobody wants to know."""


class Judge:
    """Judges plans of one module, which is read once. ``processes``: also on real ranks, of a mesh that has so many."""

    def __init__(self, spec: ModuleSpec, processes: int = 0, progress: Progress = silent) -> None:
        self.spec = spec
        self.processes = processes
        self.progress = progress
        self._expected: dict[bool, list[Step]] = {}

    @cached_property
    def data(self) -> Data:
        """Both batches."""
        return data_of(self.spec, Module(self.spec))

    @cached_property
    def loaded(self) -> Loaded | Verdict:
        """The module's program, or why there is none."""
        found: Loaded | Verdict = self._guarded("load", self._load)
        return found

    def _load(self) -> Loaded:
        from pdv.frontend import load_program

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load_program(Module(self.spec), self.data.batches[0])

    @cached_property
    def sizes(self) -> dict[str, dict[str, Any]]:
        """Which sizes the module leaves open, and what fixes the others."""
        from pdv.planning.sizes import sizes_document

        assert not isinstance(self.loaded, Verdict)
        return sizes_document(self.loaded)

    def judge(self, plan: PlanSpec) -> Verdict:
        """One plan's verdict."""
        loaded = self.loaded
        if isinstance(loaded, Verdict):
            return loaded
        graph = self._guarded("micro-batches", lambda: micro_graph(loaded.graph, plan))
        made = graph if isinstance(graph, Verdict) else self._guarded("plan", lambda: planned(graph, plan))
        if isinstance(made, Verdict):
            return made
        pcg, running = made
        mesh = problem_of(graph, plan).mesh
        proof = self._guarded("prove", lambda: verify_equal(graph, pcg, mesh, gradients=plan.mode == "train"))
        if isinstance(proof, Verdict):
            return proof
        document = {"mode": plan.mode, "sizes": self.sizes}
        emission = self._guarded("emit", lambda: emission_of(pcg, mesh, document, running))
        if isinstance(emission, Verdict):
            return emission
        simulated = self._guarded("run on simulated ranks", lambda: self._simulated(loaded, graph, emission))
        if isinstance(simulated, Verdict):
            return simulated
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            package = Path(folder) / "fuzzed_pdv"
            package.mkdir()
            emitted = self._guarded("emit", lambda: write_package(emission, document, loaded.weights, package))
            return emitted if isinstance(emitted, Verdict) else self._run(plan, package)

    def _simulated(self, loaded: Loaded, graph: Graph, emission: Emission) -> Checked | Verdict:
        """The text on all ranks, one process: another program than the source's is a mistake, not a refusal."""
        try:
            return check_text(graph, emission, loaded.weights)
        except VerificationError as error:
            kind = error.check or error.slug
            return Verdict("wrong", "on simulated ranks", kind, str(error), ranks=emission.mesh.num_devices)

    def _run(self, plan: PlanSpec, package: Path) -> Verdict:
        """Alone, then on all ranks."""
        self.write_data(package.parent, plan)
        alone = self._guarded("run alone", lambda: [observe_package(package)])
        verdict = alone if isinstance(alone, Verdict) else self.compared("alone", plan, alone)
        if verdict.failed or self.processes != plan.devices or plan.devices == 1:
            return verdict
        ranks = self._guarded("run on ranks", lambda: run_real(package, plan.devices))
        return ranks if isinstance(ranks, Verdict) else self.compared("on ranks", plan, ranks)

    def write_data(self, folder: Path, plan: PlanSpec) -> None:
        """Where ``observe_package`` looks for it."""
        given = replace(self.data, train=plan.mode == "train", in_parts=plan.run != RunSpec())
        torch.save(given, folder / "data.pt")

    def compared(self, stage: str, plan: PlanSpec, ranks: Sequence[list[Step]]) -> Verdict:
        """The verdict of what ranks observed."""
        expected = self._guarded("reference", lambda: self._own(train=plan.mode == "train"))
        if isinstance(expected, Verdict):
            return expected
        twice, rows = "equal", self.spec.batch // plan.run.micro_batches
        for steps in ranks:
            found = differences(expected, steps, self.spec.dtype)
            if found is None:
                continue
            if found.where == "run" and found.batch == "twice" and says_fixed(found.text, rows):
                twice = "fixed"
                continue
            outcome: Outcome = "crash" if found.where == "run" else "wrong"
            kind = found.text.split(":")[0] if found.where == "run" else found.where
            return Verdict(outcome, f"{stage}, {found.batch}", kind, found.text, ranks=len(ranks))
        return Verdict("equal", twice=twice, ranks=len(ranks))

    def _own(self, *, train: bool) -> list[Step]:
        """What the module itself does."""
        if train not in self._expected:
            self._expected[train] = observe_module(Module(self.spec), replace(self.data, train=train))
        return self._expected[train]

    def _guarded(self, stage: str, run: Callable[[], Any]) -> Any:  # Any: what ``run`` gives
        """That, or the verdict of what it raises."""
        self.progress(stage)
        try:
            return run()
        except PdvError as error:
            return Verdict("refused", stage, error.slug, str(error))
        except Exception as error:  # noqa: BLE001  # finding these is what this is for
            frames = [
                f"{Path(frame.filename).name}:{frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)
                if "/site-packages/" not in frame.filename
            ]
            return Verdict("crash", stage, f"{type(error).__name__} in {frames[-1]}", traceback.format_exc(limit=-6))


def planned(graph: Graph, plan: PlanSpec) -> tuple[Graph, Running]:
    """The parallel graph of a plan, and how its steps run."""
    from pdv.pcg.derive import derive
    from pdv.pcg.redistribute import Redistribution
    from pdv.rewrite.algebra import RULES
    from pdv.search.meshes import search_mesh
    from pdv.search.strategies.budget import Budget

    problem = problem_of(graph, plan)
    if plan.searched:
        found = search_mesh(replace(problem, rules=RULES), budget=Budget(SEARCH_S))
        return found.pcg, run_as(problem, found.solution.graph, found.derived, plan.run)
    derived = derive(problem, assigned(problem, plan), Redistribution(problem.mesh, problem.axes))
    return derived.pcg, run_as(problem, graph, derived, plan.run)


def run_real(package: Path, devices: int) -> list[list[Step]]:
    """On gloo processes."""
    from tests.distributed.harness import run_ranks

    return run_ranks(observe_package, devices, package, timeout_s=90)
