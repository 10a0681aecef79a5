"""Fit the constants of `pdv/simulate/calibration.py` on published runs; entry point: `fit`.

Gauss-Newton on the logarithm of predicted over measured, by finite differences, with a soft absolute loss so that a few
odd runs do not lead; sets weigh alike, however many runs they have, and of a large set a part is taken.
"""

from __future__ import annotations

import multiprocessing
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.runs import Run
from benchmarks.published.simulate import openings, workload_of
from ir.errors import PdvError
from pdv.problem.workload import Workload
from pdv.simulate.calibration import OF_FRAMEWORKS, Calibration

# Bounds are what could be believed of a machine.
BOUNDS: dict[str, tuple[float, float]] = {
    "host_forward_s": (5e-6, 2e-4),
    "host_backward_s": (3e-6, 2e-4),
    "host_pass_s": (1e-4, 2e-2),
    "host_step_s": (1e-4, 2e-2),
    "products_gpu": (1.0, 1.3),
    "attention_gpu": (0.6, 1.3),
    "traffic_gpu": (0.6, 1.3),
    "unaligned": (1.0, 4.0),
    "half_aligned": (1.0, 8.0),
    "overlap_slowdown": (1.0, 2.0),
    "collective_efficiency": (0.5, 1.0),
}
OF_A_SET = 40  # runs at most
ROUNDS = 3
STEP = 0.08  # of a logarithm, for differences
FURTHEST = 0.5  # of a logarithm, in one round
SOFT = 0.05
Values = NDArray[np.floating]


def fit(runs: Sequence[Run], cost: str, jobs: int) -> Calibration:
    """Constants that fit some runs, from where they stand now."""
    cases = [(run, works) for run in drawn(runs) if (works := opened(run, cost))]
    measured = np.log([run.measured_s for run, _ in cases])
    counts = Counter(run.set for run, _ in cases)
    weights = np.array([counts[run.set] ** -0.5 for run, _ in cases])
    low, high = np.log(np.array(list(BOUNDS.values())).T)
    at = np.clip(np.log([getattr(OF_FRAMEWORKS, name) for name in BOUNDS]), low, high)
    with multiprocessing.get_context("fork").Pool(jobs, _remember, ([works for _, works in cases],)) as pool:
        for number in range(ROUNDS):
            points = [at, *(at + STEP * (np.arange(len(at)) == i) for i in range(len(at)))]
            asked = [(case, calibration_of(point)) for point in points for case in range(len(cases))]
            found = np.log(pool.starmap(_step_s, asked, chunksize=4)).reshape(len(points), len(cases))
            errors, slopes = found[0] - measured, (found[1:] - found[0]).T / STEP
            at = at + moved(errors, slopes, weights, low - at, high - at)
            print(f"round {number}: mean error {np.abs(np.expm1(errors)).mean():.1%}", flush=True)
    return calibration_of(at)


def drawn(runs: Sequence[Run]) -> list[Run]:
    """At most ``OF_A_SET`` of each set, drawn by their numbers."""
    order = sorted(runs, key=lambda run: zlib.crc32(b"%d" % run.number))
    seen: Counter[str] = Counter()
    found = []
    for run in order:
        seen[run.set] += 1
        if seen[run.set] <= OF_A_SET:
            found.append(run)
    return found


def opened(run: Run, cost: str) -> list[Workload]:
    """The run in all the settings that its row leaves open and a program allows."""
    found = []
    for settings in openings(run):
        try:
            found.append(workload_of(run, settings, cost))
        except PdvError:
            continue
    return found


def calibration_of(logs: Values) -> Calibration:
    """The constants as they are, those fitted replaced."""
    return replace(OF_FRAMEWORKS, **{name: float(np.exp(value)) for name, value in zip(BOUNDS, logs, strict=True)})


def moved(errors: Values, slopes: Values, weights: Values, low: Values, high: Values) -> Values:
    """The step that is best for the linearized errors, within bounds."""
    from scipy.optimize import least_squares

    bounds = np.clip(low, -FURTHEST, 0.0) - 1e-9, np.clip(high, 0.0, FURTHEST) + 1e-9
    residuals = partial(_residuals, errors, slopes, weights)
    found: Values = least_squares(residuals, np.zeros(len(low)), bounds=bounds, loss="soft_l1", f_scale=SOFT).x
    return np.clip(found, low, high)


def _residuals(errors: Values, slopes: Values, weights: Values, step: Values) -> Values:
    return np.asarray(weights * (errors + slopes @ step))


_CASES: list[list[Workload]] = []


def _remember(cases: list[list[Workload]]) -> None:
    """What a forked process simulates: workloads are too large to send again and again."""
    _CASES[:] = cases


def _step_s(case: int, calibration: Calibration) -> float:
    from pdv.simulate.step import simulate

    return min(simulate(work, calibration=calibration, draws=0).step_s for work in _CASES[case])
