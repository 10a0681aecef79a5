"""Constants that few runs say something about, each part predicted by the others. Entry point: `cross_validate`.

Of modern machines there are few published runs, many of them alike: the same configuration in several releases. So a
part is a model of a set that has several, else a set; what is reported of a part comes from constants that were fitted
without it.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.runs import Run
from benchmarks.published.simulate import fastest
from pdv.simulate.calibration import OF_FRAMEWORKS, Calibration

# What runs on other machines say nothing about. Bounds are what could be believed of one.
BOUNDS: dict[str, tuple[float, float]] = {
    "scaled_products": (0.7, 1.4),
    "overlap_slowdown_light": (1.02, 2.0),
    "pieces_hidden": (0.2, 1.0),
}
STEP = 0.1  # of a logarithm, for differences
SOFT = 0.05
BY_MODEL = 20  # runs of a set from which on its models are parts
Values = NDArray[np.floating]


@dataclass(frozen=True)
class Crossed:
    """Constants fitted on all runs, and by run its error under constants that were fitted without its part."""

    calibration: Calibration
    parts: tuple[str, ...]
    errors: tuple[float, ...]


def parts_of(runs: Sequence[Run]) -> list[str]:
    """By run, the part that it is left out with."""
    sizes = Counter(run.set for run in runs)
    return [f"{run.set} {run.model}" if sizes[run.set] >= BY_MODEL else run.set for run in runs]


def cross_validate(runs: Sequence[Run], cost: str, jobs: int) -> Crossed:
    """Leave each part out in turn; of equal runs one is simulated."""
    keys = [run.stated for run in runs]
    distinct = dict(zip(keys, runs, strict=True))
    parts, place = parts_of(runs), {key: number for number, key in enumerate(distinct)}
    measured = np.log([run.measured_s for run in runs])
    at = np.log([getattr(OF_FRAMEWORKS, name) for name in BOUNDS])
    points = [at, *(at + STEP * (np.arange(len(at)) == i) for i in range(len(at)))]
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        ask = partial(steps_of, cost=cost, calibrations=[calibration_of(point) for point in points])
        found = np.log(np.array(pool.map(ask, list(distinct.values()), chunksize=1)).T)
        logs = found[:, [place[key] for key in keys]]
        errors, slopes = logs[0] - measured, (logs[1:] - logs[0]).T / STEP
        fitted = {part: at + moved(errors, slopes, weights(parts, part), at) for part in (*dict.fromkeys(parts), "")}
        by_part: dict[str, dict[str, Run]] = defaultdict(dict)
        for key, part, run in zip(keys, parts, runs, strict=True):
            by_part[part][key] = run
        crossed: dict[tuple[str, str], float] = {}
        for part, own in by_part.items():
            ask = partial(steps_of, cost=cost, calibrations=[calibration_of(fitted[part])])
            times = pool.map(ask, list(own.values()), chunksize=1)
            crossed |= {(part, key): time for key, (time,) in zip(own, times, strict=True)}
    answers = [crossed[part, key] / run.measured_s - 1 for part, key, run in zip(parts, keys, runs, strict=True)]
    return Crossed(calibration_of(fitted[""]), tuple(parts), tuple(answers))


def steps_of(run: Run, *, cost: str, calibrations: Sequence[Calibration]) -> list[float]:
    """Seconds of a step under each of some constants, in the settings that are fastest under the first."""
    from benchmarks.published.simulate import workload_of
    from pdv.simulate.step import simulate

    work = workload_of(run, fastest(run, calibrations[0], cost), cost)
    return [simulate(work, calibration=one, draws=8).step_s for one in calibrations]


def calibration_of(logs: Values) -> Calibration:
    """The constants as they are, those fitted replaced."""
    return replace(OF_FRAMEWORKS, **{name: float(np.exp(value)) for name, value in zip(BOUNDS, logs, strict=True)})


def weights(parts: Sequence[str], left_out: str) -> Values:
    """Parts weigh alike, and the one that is left out nothing."""
    counts = Counter(parts)
    return np.array([0.0 if part == left_out else counts[part] ** -0.5 for part in parts])


def moved(errors: Values, slopes: Values, weight: Values, at: Values) -> Values:
    """The step that is best for the linearized errors, within bounds."""
    from scipy.optimize import least_squares

    low, high = np.log(np.array(list(BOUNDS.values())).T) - at[None]
    bounds = np.minimum(low, 0.0) - 1e-9, np.maximum(high, 0.0) + 1e-9

    def residuals(step: Values) -> Values:
        return np.asarray(weight * (errors + slopes @ step))

    found: Values = least_squares(residuals, np.zeros(len(at)), bounds=bounds, loss="soft_l1", f_scale=SOFT).x
    return found


def interval(errors: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """90 % of means of absolute errors, by drawing runs again with replacement (Efron, 1979)."""
    sizes, rng = np.abs(np.array(errors)), np.random.default_rng(0)
    means = sizes[rng.integers(0, len(sizes), (draws, len(sizes)))].mean(axis=1)
    low, high = np.quantile(means, (0.05, 0.95))
    return float(low), float(high)
