"""Two pictures of predictions: predicted against measured, and the error by size. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ir.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.floating[Any]]  # Any: of either width
PREDICTED, BY_SIZE = "predicted-against-measured.png", "error-by-size.png"
LEAST = 20  # rows of a bin whose error is drawn


def pictures(measured_s: Floats, predicted_s: Floats, title: str) -> dict[str, bytes]:
    """PNG files by name.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "plots need matplotlib, which is not installed", mend="pip install 'pipedejavu[learned]'"
        ) from None
    made = {}
    for name, draw in ((PREDICTED, _predict), (BY_SIZE, _by_size)):
        figure = Figure(figsize=(6.0, 5.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes, measured_s, predicted_s)
        axes.set_title(title, fontsize=10)
        content = BytesIO()
        figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
        made[name] = content.getvalue()
    return made


def _predict(axes: Axes, measured: Floats, predicted: Floats) -> None:
    low, high = float(min(measured.min(), predicted.min())), float(max(measured.max(), predicted.max()))
    axes.hexbin(measured, predicted, gridsize=80, xscale="log", yscale="log", bins="log", mincnt=1, cmap="viridis")
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    for factor in (0.8, 1.25):
        axes.plot([low, high], [low * factor, high * factor], color="black", linewidth=0.5, linestyle=":")
    axes.set_xlabel("measured, seconds")
    axes.set_ylabel("predicted, seconds (dotted: 25 % off)")


def _by_size(axes: Axes, measured: Floats, predicted: Floats) -> None:
    error = 100.0 * np.abs(predicted / measured - 1.0)
    points = list(_bins(measured, error))
    centres = [centre for centre, _ in points]
    for share, style in ((0.5, "-"), (0.9, "--")):
        values = [float(np.quantile(errors, share)) for _, errors in points]
        label = "median" if share == 0.5 else f"{share:.0%} quantile"
        axes.plot(centres, values, style, marker="o", markersize=3, label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("measured, seconds")
    axes.set_ylabel("error, % of the measured time")
    axes.legend()


def _bins(measured: Floats, error: Floats) -> Iterator[tuple[float, Floats]]:
    """Four bins a decade: the middle of each, and the errors in it."""
    place = np.floor(4.0 * np.log10(measured)).astype(np.int64)
    for bin_ in np.unique(place):
        inside = error[place == bin_]
        if len(inside) >= min(LEAST, len(error)):
            yield float(10.0 ** ((bin_ + 0.5) / 4.0)), inside
