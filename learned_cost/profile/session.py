"""A profiling run: groups take turns until the time is up, each row kept the moment it is measured.

Entry point: ``run``. Running it again on the same folder goes on: what is there is not measured again, and what it says
steers what is measured next.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ir.ops import OPERATORS
from learned_cost.data.kernel import FUSED
from learned_cost.describe import measured_names
from learned_cost.profile.programs.groups import Group, RowTask
from learned_cost.profile.programs.sampling import Fair
from learned_cost.profile.rows import Setting, kernel_of, kernel_row, measured_key
from learned_cost.profile.store import Row, Store
from learned_cost.profile.timing import Stopwatch, Timing

Progress = Callable[[str, float], None]  # what is measured, share of the time


@dataclass
class Outcome:
    """What a run did: new rows by operator, rows that were there before, and what could not be run, by reason."""

    measured: Counter[str] = field(default_factory=Counter)
    before: int = 0
    failed: Counter[str] = field(default_factory=Counter)


def run(
    store: Store,
    groups: Sequence[Group],
    setting: Setting,
    stopwatch: Stopwatch,
    *,
    budget_s: float,
    progress: Progress = lambda what, share: None,
) -> Outcome:
    """Measure for ``budget_s`` seconds.

    Raises:
        WriteError: if the disk is full; what was measured is kept.
    """
    begun = time.monotonic()
    rows = store.read()
    done = {measured_key(row) for row in rows}
    outcome = Outcome(before=len(rows))
    learn_from(rows, groups)
    fair = Fair([(group, group.weight) for group in groups])
    while (group := fair.turn()) is not None and time.monotonic() - begun < budget_s:
        first, started = fair.is_new(group), time.monotonic()
        tasks = group.turn()
        if tasks is None:
            fair.drop(group)
            continue
        for task in tasks:
            if time.monotonic() - begun >= budget_s:
                break
            progress(group.name, (time.monotonic() - begun) / budget_s)
            _one(task, group, store, setting, stopwatch, done, outcome)
        # A first turn loads and compiles libraries, which says nothing of what the next will take.
        fair.spent(group, 1e-4 if first else max(time.monotonic() - started, 1e-4))
    return outcome


def _one(
    task: RowTask,
    group: Group,
    store: Store,
    setting: Setting,
    stopwatch: Stopwatch,
    done: set[tuple[object, ...]],
    outcome: Outcome,
) -> None:
    """Measure a task, unless it was."""
    nothing = Timing(1e-6, 0.0, 1)
    key = measured_key(_row(setting, task, nothing))
    if key in done:
        return
    store.reserve()
    try:
        timing = stopwatch.measure(task.prepare(stopwatch.device), task.l2)
    except Exception as error:  # noqa: BLE001  # no kernel for this dtype, no memory, a compiler's own failure
        outcome.failed[f"{group.name}: {type(error).__name__}: {' '.join(str(error).split())[:100]}"] += 1
        return
    done.add(key)
    row = _row(setting, task, timing)
    store.append(row)
    outcome.measured[str(row["op"])] += 1
    if row["l2"] == "warm" and row["direction"] == "forward":
        group.learn(task.what, surprise(row))


def _row(setting: Setting, task: RowTask, timing: Timing) -> Row:
    name = task.name
    return kernel_row(setting, task.what, timing, l2=task.l2, layout=task.layout, plan=task.plan, name=name)


def surprise(row: Row) -> float:
    """Log of the measured time over the roofline's."""
    return math.log(float(row["latency_us"]) / max(float(row["roofline_us"]), 1e-4))


def learn_from(rows: Sequence[Row], groups: Sequence[Group]) -> None:
    """Tell groups what earlier runs found, so that they go on elsewhere."""
    by_name = {group.name: group for group in groups}
    for row in rows:
        group = by_name.get(GROUP_OF.get(str(row["op"]), str(row["op"])))
        steers = row["op"] != FUSED and row.get("l2") == "warm" and row["direction"] == "forward"
        if group is not None and steers:
            group.learn(kernel_of(row), surprise(row))


GROUP_OF: Mapping[str, str] = {name: op.name for op in reversed([*OPERATORS.values()]) for name in measured_names(op)}
"""By what profiles call a kernel: the operator whose group measures it, the first of those that run it."""
