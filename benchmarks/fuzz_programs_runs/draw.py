"""Random modules: ``draw_module(seed, number)`` gives the same one each time.

Steps are drawn one after another over the values that there are, and tried at once at the planned batch and at twice
that, so that every module is a valid one whose values are of moderate size.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.fuzz_programs_runs.module import OPERATIONS, Module, example
from benchmarks.fuzz_programs_runs.pool import Pool
from benchmarks.fuzz_programs_runs.spec import Input, ModuleSpec, Step

LARGEST = 100.0  # of any value: beyond, rounding in float32 would be mistaken for a difference
MOST_ELEMENTS = 1 << 14
TRIES = 60
KINDS = ("sequence", "ids", "image", "rows", "several")


def draw_module(seed: int, number: int) -> ModuleSpec:
    """A module with at least one output that depends on an input."""
    for attempt in range(20):
        rng = random.Random(f"module {seed} {number} {attempt}")
        spec = _Drawing(rng, rng.randrange(1 << 30)).run()
        if spec is not None:
            return spec
    raise AssertionError(f"no module for {seed}, {number}")


class _Drawing:
    def __init__(self, rng: random.Random, seed: int) -> None:
        self.rng = rng
        self.count = 0
        batch = rng.choice([12, 12, 6, 8, 4])
        dtype = "float32" if rng.random() < 0.2 else "float64"
        self.spec = ModuleSpec(seed, batch, dtype, self._inputs(), (), ())
        self.pool = Pool(rng, batch)
        once, twice = (example(self.spec, rows) for rows in (batch, 2 * batch))
        for entry, x, y in zip(self.spec.inputs, once, twice, strict=True):
            self.pool.values[entry.name] = x, y

    def _inputs(self) -> tuple[Input, ...]:
        rng = self.rng
        length, width = rng.choice([4, 6, 8, 12, 5]), rng.choice([8, 12, 24])
        image = (rng.choice([3, 4, 6]), rng.choice([4, 6, 8, 7]), rng.choice([4, 6, 8]))
        match rng.choice(KINDS):
            case "sequence":
                return (Input("x", (length, width)),)
            case "ids":
                return (Input("ids", (length,), 12),)
            case "image":
                return (Input("image", image),)
            case "rows":
                return (Input("x", (width,)),)
        pairs = (Input("x", (length, width)), Input("y", (rng.choice([length, 6]), width))), (
            Input("ids", (length,), 12), Input("x", (length, width)),
        ), (Input("image", image), Input("x", (width,)))  # fmt: skip
        return rng.choice(pairs)

    def run(self) -> ModuleSpec | None:
        wanted = self.rng.randint(2, 12)
        for _ in range(TRIES):
            if len(self.spec.steps) >= wanted:
                break
            if self.rng.random() < 0.08:
                self._repeat()
            else:
                self._one()
        return self._finished()

    def _one(self) -> Step | None:
        """Draw one step and run it; None if it does not work out."""
        names = list(OPERATIONS)
        op = self.rng.choices(names, [OPERATIONS[name].often for name in names])[0]
        drawn = OPERATIONS[op].draw(self.pool)
        if drawn is None:
            return None
        of, attrs = drawn
        weights = attrs.pop("weights", "")
        if not weights and op in ("linear", "attention", "embedding") and self.rng.random() < 0.1:
            weights, attrs = self._again(op, attrs)
        return self._taken(Step(f"v{self.count}", op, of, attrs, weights=weights))

    def _again(self, op: str, attrs: dict[str, object]) -> tuple[str, dict[str, object]]:
        """The weights of an earlier step of the same kind, whose attributes come with them."""
        earlier = [step for step in self.spec.steps if step.op == op and not step.weights]
        if not earlier:
            return "", attrs
        step = self.rng.choice(earlier)
        return step.id, dict(step.attrs)

    def _taken(self, step: Step) -> Step | None:
        """Add a step if its result is finite, of moderate size, and grows evenly with the batch."""
        grown = replace(self.spec, steps=(*self.spec.steps, step), outputs=(step.id,))
        try:
            module = Module(grown)
            once, twice = (self._result(module, step, index) for index in (0, 1))
        except (RuntimeError, AssertionError, IndexError, ValueError, TypeError):
            return None
        for x in (once, twice):
            if not x.numel() or x.numel() > 2 * MOST_ELEMENTS or not x.isfinite().all() or x.abs().max() > LARGEST:
                return None
        if once.dim() != twice.dim():
            return None
        self.spec, self.count = replace(grown, outputs=()), self.count + 1
        self.pool.values[step.id] = once, twice
        for name, parameter in module.named_parameters():
            if name.endswith(f"{step.id}_w"):
                self.pool.owners[step.id] = step.op, tuple(parameter.shape)
        return step

    @torch.no_grad()
    def _result(self, module: Module, step: Step, index: int) -> Tensor:
        return module.step(step, [self.pool.values[name][index] for name in step.of])

    def _repeat(self) -> None:
        """A residual block, several times: with weights of its own each time, or always the same."""
        x = self.pool.pick(lambda t: t.dim() >= 2)
        if x is None:
            return
        spec, pool, count = self.spec, self.pool, self.count
        block = self._block(x)
        if not block:
            self.spec, self.pool, self.count = spec, pool, count
            return
        shared = self.rng.random() < 0.25
        scopes = [f"blocks{count}.{i}" for i in range(self.rng.choice([2, 3, 4]))]
        self.spec, self.pool, self.count = spec, pool, count + len(block)
        before = x
        for i, scope in enumerate(scopes):
            rename = {x: before, **{step.id: f"{step.id}r{i}" for step in block}}
            for step in block:
                owner = step.weights or (step.id if shared else "")
                copy = replace(
                    step, id=rename[step.id], of=tuple(rename.get(name, name) for name in step.of),
                    scope="" if shared else scope,
                    weights=(f"{owner}r0" if shared and i else "") if not step.weights else rename.get(owner, owner),
                )  # fmt: skip
                if self._taken(copy) is None:
                    return
            before = rename[block[-1].id]

    def _block(self, x: str) -> list[Step]:
        """Steps from ``x`` to ``x + f(x)``, drawn apart; none if no value of its shape came out."""
        shape = self.pool.sizes(x)
        inner = Pool(self.rng, self.pool.batch, {x: self.pool.values[x]})
        first = len(self.spec.steps)
        self.pool = inner
        wanted = self.rng.randint(2, 5)
        for _ in range(20):
            if len(self.spec.steps) - first >= wanted:
                break
            self._one()
        same = [name for name in inner.values if name != x and inner.sizes(name) == shape]
        if not same:
            return []
        last = self._taken(Step(f"v{self.count}", "binary", (x, self.rng.choice(same[-2:])), {"f": "add"}))
        return _needed(self.spec.steps[first:], last.id) if last is not None else []

    def _finished(self) -> ModuleSpec | None:
        """With outputs: what nobody reads, or some of it, and now and then a value that is read on."""
        steps = self.spec.steps
        read = {name for step in steps for name in step.of}
        ends = [step.id for step in steps if step.id not in read]
        if not ends:
            return None
        kept = self.rng.sample(ends, min(len(ends), self.rng.choice([1, 2, 3])))
        inner = [step.id for step in steps if step.id in read]
        if inner and self.rng.random() < 0.15:
            kept.append(self.rng.choice(inner))
        spec = pruned(replace(self.spec, outputs=tuple(kept)))
        known = {entry.name for entry in spec.inputs}
        return spec if spec.steps and known and set(spec.outputs) - known else None


def _needed(steps: tuple[Step, ...], *ends: str) -> list[Step]:
    """The steps that ``ends`` depend on, in order."""
    wanted = set(ends)
    found = []
    for step in reversed(steps):
        if step.id in wanted:
            found.append(step)
            wanted.update(step.of)
            wanted.update([step.weights] if step.weights else [])
    return found[::-1]


def pruned(spec: ModuleSpec) -> ModuleSpec:
    """Without steps and inputs that no output depends on (steps stay whose weights others use)."""
    steps = tuple(_needed(spec.steps, *spec.outputs))
    read = {name for step in steps for name in step.of} | set(spec.outputs)
    return replace(spec, steps=steps, inputs=tuple(entry for entry in spec.inputs if entry.name in read))
