"""Failing programs made small: whatever can be left out while a program still fails in the same way.

Entry point: ``shrunk``. Tried are fewer outputs, fewer steps, a smaller mesh, fewer cuts, simpler attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.fuzz_programs_runs.assignment import tidied
from benchmarks.fuzz_programs_runs.draw import pruned
from benchmarks.fuzz_programs_runs.judge import Judge, Verdict
from benchmarks.fuzz_programs_runs.running import micro_graph
from benchmarks.fuzz_programs_runs.spec import ModuleSpec, PlanSpec, Program, RunSpec, Step

TRIALS = 150


def shrunk(
    program: Program, verdict: Verdict, processes: int, progress: Callable[[str], None]
) -> tuple[Program, Verdict]:
    """A smallest program of the same signature that leaving things out one after another leads to."""
    trials, seen = 0, {program.text()}
    going = True
    while going:
        going = False
        for smaller in _smaller(program):
            if smaller.text() in seen:
                continue
            seen.add(smaller.text())
            trials += 1
            if trials > TRIALS:
                return program, verdict
            progress(f"shrinking, trial {trials}")
            ranks = smaller.plan.devices if processes else 0
            judge = Judge(smaller.module, ranks)
            found = judge.judge(smaller.plan)
            if found.signature == verdict.signature:
                program, verdict, going = _tidied(judge, smaller), found, True
                break
    return program, verdict


def _tidied(judge: Judge, program: Program) -> Program:
    """Without what the plan says of operators that are gone."""
    if isinstance(judge.loaded, Verdict):
        return program
    return Program(program.module, tidied(micro_graph(judge.loaded.graph, program.plan), program.plan))


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something left out, the most first."""
    module, plan = program.module, program.plan
    for fewer in _modules(module):
        yield Program(fewer, plan)
    for simpler in _plans(plan):
        yield Program(module, simpler)
    for number, step in enumerate(module.steps):
        for simple in _simpler(step):
            steps = (*module.steps[:number], simple, *module.steps[number + 1 :])
            yield Program(pruned(replace(module, steps=steps)), plan)
    if module.dtype != "float64":
        yield Program(replace(module, dtype="float64"), plan)


def _modules(module: ModuleSpec) -> Iterator[ModuleSpec]:
    if len(module.outputs) > 1:
        yield from (pruned(replace(module, outputs=(name,))) for name in module.outputs)
        yield from (
            pruned(replace(module, outputs=(*module.outputs[:i], *module.outputs[i + 1 :])))
            for i in range(len(module.outputs))
        )
    for step in module.steps[:-1]:
        yield pruned(replace(module, outputs=(step.id,)))
    for number, step in enumerate(module.steps):
        used = [other for other in module.steps if other.weights == step.id]
        for operand in dict.fromkeys(step.of):
            if used:
                break
            rename = {step.id: operand}
            steps = tuple(
                replace(other, of=tuple(rename.get(name, name) for name in other.of))
                for other in (*module.steps[:number], *module.steps[number + 1 :])
            )
            outputs = tuple(dict.fromkeys(rename.get(name, name) for name in module.outputs))
            if steps and not set(outputs) <= {entry.name for entry in module.inputs}:
                yield pruned(replace(module, steps=steps, outputs=outputs))


def _plans(plan: PlanSpec) -> Iterator[PlanSpec]:
    yield from (replace(plan, run=run) for run in _runs(plan.run))
    for axis in range(len(plan.mesh)):
        if len(plan.mesh) > 1:
            yield _without_axis(plan, axis)
    for axis, (name, size) in enumerate(plan.mesh):
        for less in range(1, size):
            if size % less == 0:
                yield replace(plan, mesh=(*plan.mesh[:axis], (name, less), *plan.mesh[axis + 1 :]))
    if plan.storage:
        yield replace(plan, storage={})
    cut = [i for i, (_, labels) in enumerate(plan.splits) if set(labels) - {"none"}]
    width = len(cut)
    while width:
        for start in range(0, len(cut), width):
            yield _whole(plan, set(cut[start : start + width]))
        width //= 2
    for name in plan.storage if len(plan.storage) > 1 else ():
        yield replace(plan, storage={other: rest for other, rest in plan.storage.items() if other != name})


def _runs(run: RunSpec) -> Iterator[RunSpec]:
    simpler = [RunSpec(), replace(run, recompute=False), replace(run, offload=False)]
    simpler += [replace(run, micro_batches=1), replace(run, cuts=(), virtual=1, order="1f1b")]
    if run.virtual == 1:
        simpler += [replace(run, cuts=(*run.cuts[:i], *run.cuts[i + 1 :])) for i in range(len(run.cuts))]
    yield from (less for less in simpler if less != run)


def _without_axis(plan: PlanSpec, axis: int) -> PlanSpec:
    def left(row: tuple[Any, ...]) -> tuple[Any, ...]:  # Any: sizes, labels, states
        return (*row[:axis], *row[axis + 1 :])

    storage = {name: (",".join(left(tuple(text.split(",")))), again) for name, (text, again) in plan.storage.items()}
    splits = tuple((op, left(labels)) for op, labels in plan.splits)
    return replace(plan, mesh=left(plan.mesh), splits=splits, storage=storage)


def _whole(plan: PlanSpec, numbers: set[int]) -> PlanSpec:
    """Some operators cut nowhere."""
    splits = tuple(
        (op, ("none",) * len(labels) if i in numbers else labels) for i, (op, labels) in enumerate(plan.splits)
    )
    return replace(plan, splits=splits)


def _simpler(step: Step) -> Iterator[Step]:
    for name, value in step.attrs.items():
        if value is True:
            yield replace(step, attrs={**step.attrs, name: False})
        elif name in ("mask", "positions") and value not in ("none", None) and isinstance(value, str):
            yield replace(step, attrs={**step.attrs, name: "none"})
    if step.scope:
        yield replace(step, scope="")
