"""What a training run shows of itself while it runs: scalars for TensorBoard, measured beside predicted.

The prediction is what the package's plan.json says of a step on the cluster that it was planned for. Entry point:
``Metrics``.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from ir.errors import UsageError, WriteError
from pdv.loops.pieces import is_first, pieces_of

GIB = 2**30
LINES = "metrics.jsonl"
Form = Literal["auto", "tensorboard", "json"]


class Metrics:
    """Scalars of a run, which rank 0 writes: to TensorBoard where it is installed, else as lines of JSON.

    every: of so many steps one value, over all of these: time is a mean, and reading a loss waits for the device.
    form: "tensorboard" or "json" take one of the two.

    Raises:
        UsageError: if ``model`` is none of a package, or TensorBoard is asked for and not there.
        WriteError: if the folder cannot be written.
    """

    def __init__(
        self, model: Any, folder: str | os.PathLike[str], *, every: int = 1, form: Form = "auto", first_step: int = 0
    ) -> None:
        if every < 1:
            raise UsageError(f"every is {every}", "1 or more", "Count steps")
        pieces_of(model)
        self.step, self.every, self._model = first_step, every, model
        self._predicted = predictions(model)
        self._file: Any = None
        self._writer = _writer(Path(folder), form) if is_first() else None
        if is_first() and self._writer is None:
            self._file = _lines(Path(folder))
        self._started, self._tokens, self._rows, self._counted = time.perf_counter(), 0, 0, 0

    def start(self) -> None:
        """Count time from here: behind an evaluation, or a checkpoint."""
        self._wait()
        self._started, self._tokens, self._rows, self._counted = time.perf_counter(), 0, 0, 0

    def after_step(self, loss: Any = None, *, rows: int = 0, tokens: int = 0, **others: float) -> dict[str, float]:
        """Count a step; where one is told, the scalars that were written, the same on every rank but for times.

        rows, tokens: of the whole batch. others: what else is to be seen (``grad_norm=…``).
        """
        self.step, self._counted = self.step + 1, self._counted + 1
        self._tokens, self._rows = self._tokens + tokens, self._rows + rows
        if self._counted < self.every:
            return {}
        self._wait()
        seconds = (time.perf_counter() - self._started) / self._counted
        found = {name: float(value) for name, value in others.items()}
        if loss is not None:
            found["loss"] = float(loss)
        found["step_ms/measured"] = seconds * 1e3
        if tokens:
            found["tokens_per_s/measured"] = self._tokens / self._counted / seconds
        found |= self._memory() | self._beside()
        self._write(found)
        self.start()
        return found

    def _beside(self) -> dict[str, float]:
        """What was predicted, of a batch of as many rows as were planned."""
        said, found = self._predicted, {}
        if self._rows and self._rows != self._counted * said.get("rows", self._rows / self._counted):
            return {}
        if "step_s" in said:
            found["step_ms/predicted"] = said["step_s"] * 1e3
            if self._tokens:
                found["tokens_per_s/predicted"] = self._tokens / self._counted / said["step_s"]
        if "memory_bytes" in said:
            found["memory_gib/predicted"] = said["memory_bytes"] / GIB
        return found

    def _memory(self) -> dict[str, float]:
        """What is taken of this rank's device, which its allocator never gives back; on CPUs nobody counts it."""
        if self._model.mesh.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._model.mesh.device)
        return {"memory_gib/measured": (total - free) / GIB}

    def _wait(self) -> None:
        if self._model.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._model.mesh.device)

    def _write(self, found: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in found.items():
                self._writer.add_scalar(name, value, self.step)
        elif self._file is not None:
            line = {name: value if math.isfinite(value) else None for name, value in found.items()}
            try:
                self._file.write(json.dumps({"step": self.step, **line}) + "\n")
                self._file.flush()
            except OSError as error:
                raise WriteError(f"metrics cannot be written: {error}") from error

    def close(self) -> None:
        """Write what is left."""
        for each in (self._writer, self._file):
            if each is not None:
                each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def predictions(model: Any) -> dict[str, float]:  # Any: an emitted model
    """What plan.json beside the program says of a step: ``step_s``, ``memory_bytes`` of the fullest device, ``rows``.

    Empty where there is none, as in a package whose folder is gone.
    """
    path = Path(inspect.getfile(type(model))).with_name("plan.json")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        said, inputs = document["predicted"], document["source"]["inputs"]
        found = {
            "step_s": float(said["step_time_s"]["mean"]),
            "memory_bytes": float(max(said["memory_bytes"].values())),
        }
        if inputs and inputs[0]["shape"]:
            found["rows"] = float(inputs[0]["shape"][0] * model.micro_batches)  # the file's are of a micro-batch
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found


def _writer(folder: Path, form: Form) -> Any:
    """TensorBoard's; None where lines are written."""
    if form == "json":
        return None
    try:
        tensorboard: Any = import_module("torch.utils.tensorboard")
    except ImportError as error:
        if form == "auto":
            return None
        raise UsageError(f"TensorBoard is not here ({error})", "json", "pip install tensorboard") from error
    try:
        return tensorboard.SummaryWriter(str(folder))
    except OSError as error:
        raise WriteError(f"{folder} cannot be written: {error}") from error


def _lines(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LINES).open("a", encoding="utf-8")
    except OSError as error:
        raise WriteError(f"{folder} cannot be written: {error}") from error
