"""How much slower the slowest of many equal devices is: drawn, so that a step has a mean and a deviation.

Devices that wait for each other take as long as the slowest of them. The largest of n standard normals is drawn at
once, by the inverse of its distribution function at the n-th root of a uniform number, so that 100,000 devices cost no
more than one. Draws are spread evenly (McKay et al., Technometrics 1979), for a few of them to have the mean of many.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

SURE = 1e-12  # uniform numbers are kept this far from 0 and 1


def factors(
    stages: int, devices: int, draws: int, std: float, seed: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[stages, draws]: by what a stage of so many devices takes longer; never less than half of what it takes."""
    rng = np.random.default_rng(seed)
    spread = np.stack([rng.permutation(draws) for _ in range(stages)]) if draws else np.zeros((stages, 0))
    uniform = np.clip((spread + rng.random((stages, draws))) / max(draws, 1), SURE, 1.0 - SURE)
    normal = NormalDist()
    largest = [[normal.inv_cdf(min(u ** (1.0 / devices), 1.0 - SURE)) for u in row] for row in uniform.tolist()]
    return np.maximum(0.5, 1.0 + std * np.array(largest).reshape(stages, draws))
