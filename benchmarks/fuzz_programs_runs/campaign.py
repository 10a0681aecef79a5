"""Many programs, one after another: drawn, judged, counted; failures shrunk and kept. Entry point: ``Campaign``."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.fuzz_programs_runs.assignment import MESHES, draw_plan
from benchmarks.fuzz_programs_runs.draw import draw_module
from benchmarks.fuzz_programs_runs.isolate import DiedError, Isolated
from benchmarks.fuzz_programs_runs.judge import Judge, Verdict
from benchmarks.fuzz_programs_runs.shrink import shrunk
from benchmarks.fuzz_programs_runs.spec import PlanSpec, Program

PLANS = 4  # of each module: reading one costs as much as judging some plans
SHRUNK_ALIKE = 2  # failures of one signature that are shrunk; more would be the same mistake
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """A program (None where its module could not even be read) and its verdict."""

    name: str
    program: Program | None
    verdict: Verdict
    seconds: float


def judge_module(
    seed: int,
    number: int,
    first: int,
    last: int,
    devices: Sequence[int],
    *,
    real: bool,
    progress: Progress,
    parts: bool = False,
) -> Iterator[Result]:
    """Plans ``first`` to ``last`` of a module; ``parts``: of steps in micro-batches, stages and with recomputation."""
    module = draw_module(seed, number)
    judge = Judge(module, 0, progress)
    for index in range(first, last):
        started = time.process_time()
        name = f"{seed}-{number}-{index}"
        progress(f"{index} drawing")
        judge.progress = lambda stage, index=index: progress(f"{index} {stage}")  # type: ignore[misc]
        loaded = judge.loaded
        if isinstance(loaded, Verdict):
            yield Result(name, Program(module, PlanSpec((("a", 1),))), loaded, time.process_time() - started)
            continue
        rng = random.Random(f"plan {seed} {number} {index}")
        ways = random.Random(f"parts {seed} {number} {index}") if parts else None
        plan = draw_plan(loaded.graph, rng.choice(devices), rng, ways)
        judge.processes = plan.devices if real else 0
        yield Result(name, Program(module, plan), judge.judge(plan), time.process_time() - started)


def work(task: str, arguments: dict[str, Any], progress: Progress) -> Any:
    """What the isolated process does: judge plans of a module, or shrink a program."""
    if task == "judge":
        return list(judge_module(**arguments, progress=progress))
    program, verdict = arguments["program"], arguments["verdict"]
    return shrunk(program, verdict, arguments["processes"], progress)


@dataclass
class Campaign:
    """``devices``: in all; ``real``: run on that many gloo processes, too; ``folder``: where failures go.

    ``parts``: steps are taken in micro-batches, stages and with recomputation.
    """

    seed: int
    devices: tuple[int, ...] = tuple(MESHES)
    real: bool = False
    folder: Path | None = None
    shrinks: bool = True
    parts: bool = False
    isolated: Isolated = field(default_factory=lambda: Isolated(work))
    failures: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def run(self, start: int, count: int) -> Iterator[Result]:
        """Programs number ``start`` to ``start + count``, whatever becomes of any of them."""
        done, end = start, start + count
        while done < end:
            number, first = divmod(done, PLANS)
            last = min(PLANS, first + end - done)
            for result in self._module(number, first, last):
                done += 1
                if result.verdict.failed:
                    self._keep(result)
                yield result

    def _module(self, number: int, first: int, last: int) -> list[Result]:
        arguments: dict[str, Any] = {"seed": self.seed, "number": number, "devices": self.devices}
        arguments |= {"real": self.real, "parts": self.parts}
        try:
            found: list[Result] = self.isolated("judge", {**arguments, "first": first, "last": last})
        except DiedError as error:
            return self._survivors(arguments, first, last, error)
        return found

    def _survivors(self, arguments: dict[str, Any], first: int, last: int, error: DiedError) -> list[Result]:
        """One plan after another, where one of several took the process with it."""
        found: list[Result] = []
        for index in range(first, last):
            try:
                found += self.isolated("judge", {**arguments, "first": index, "last": index + 1})
            except DiedError as again:
                error = again
                stage = error.at.partition(" ")[2]
                name = f"{self.seed}-{arguments['number']}-{index}"
                module = draw_module(self.seed, arguments["number"])
                verdict = Verdict("crash", stage, str(error), f"{error} at {error.at}")
                found.append(Result(name, Program(module, PlanSpec((("a", 1),))), verdict, 0.0))
        return found

    def _keep(self, result: Result) -> None:
        """A failure of a new kind: shrunk, and written as JSON and as a test."""
        seen = self.failures[result.verdict.signature] = self.failures.get(result.verdict.signature, 0) + 1
        if self.folder is None or seen > SHRUNK_ALIKE or result.program is None:
            return
        program, verdict = result.program, result.verdict
        if self.shrinks:
            processes = program.plan.devices if "ranks" in verdict.stage else 0
            arguments = {"program": program, "verdict": verdict, "processes": processes}
            try:
                program, verdict = self.isolated("shrink", arguments)
            except (DiedError, RuntimeError) as error:
                verdict = replace(verdict, text=f"{verdict.text}\n(not shrunk: {error})")
        write_failure(self.folder, result.name, program, verdict)


def write_failure(folder: Path, name: str, program: Program, verdict: Verdict) -> None:
    """NAME.json (the program), NAME.verdict.json, and test_NAME.py, which fails as it does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(program.text(), encoding="utf-8")
    (folder / f"{name}.verdict.json").write_text(json.dumps(asdict(verdict), indent=1) + "\n", encoding="utf-8")
    processes = program.plan.devices if "ranks" in verdict.stage else 0
    said = " ".join(word for word in verdict.signature if word)
    (folder / f"test_{name.replace('-', '_')}.py").write_text(
        "from benchmarks.fuzz_programs_runs.judge import Judge\n"
        "from benchmarks.fuzz_programs_runs.spec import Program\n\n"
        f'PROGRAM = r"""\n{program.text()}"""\n\n\n'
        f"def test_{program.key}() -> None:\n"
        f'    """Was: {said}."""\n'
        "    program = Program.parse(PROGRAM)\n"
        f"    verdict = Judge(program.module, processes={processes}).judge(program.plan)\n"
        "    assert not verdict.failed, verdict.text\n",
        encoding="utf-8",
    )


__all__ = ["Campaign", "Result"]
