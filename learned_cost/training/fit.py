"""The training loop: AdamW on a warmed-up cosine, checkpoints that survive a kill, and the same result when resumed.

Knows nothing of kernels: a ``TrainingTask`` has a module and the loss of some rows. What is learned from which
rows is decided in ``learned_cost.training.train``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ir.errors import DataError, WeightsError
from learned_cost.weights import Arrays, load_checkpoint, save_checkpoint

Progress = Callable[[str, float | None], None]
LAST = 0.01  # the learning rate at the end, as a share of the highest
PAUSE_S = 10.0  # a step that took longer was a pause of the machine, and does not count against a budget
KEEPS = 50  # losses that the mean in the progress is of


@dataclass(frozen=True, slots=True)
class FitConfig:
    """How to train.

    Attributes:
        batch_rows: rows of a step.
        warmup: share of the steps over which the learning rate rises.
        clip: largest norm of a gradient.
        ema: decay of the averaged weights that are the result; 0 takes the last ones.
        budget_s: seconds of training after which it ends, its learning rate having fallen by then; a resumed training
            gives the same weights as one in a piece only without a budget, since clocks differ.
    """

    epochs: int = 20
    batch_rows: int = 4096
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    warmup: float = 0.05
    clip: float = 1.0
    ema: float = 0.0
    bf16: bool = False
    seed: int = 0
    budget_s: float | None = None


class TrainingTask(Protocol):
    """What is trained."""

    module: nn.Module

    @property
    def rows(self) -> int:
        """Training examples in an epoch."""

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """The rows of an epoch, ``rows`` many, in the order of training; a function of its arguments alone."""

    def loss(self, rows: NDArray[np.int64]) -> Tensor:
        """The mean loss of these rows, differentiable in the module's parameters."""

    def identity(self) -> Mapping[str, Any]:
        """What distinguishes this training from others, as JSON: a checkpoint of another one is not resumed."""


@dataclass
class Fitted:
    """What a training came to.

    Attributes:
        losses: mean loss of each epoch (a last one may be cut short by the budget).
        steps, seconds: of training, resumed parts included.
    """

    losses: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0


def shuffle(rows: int, epoch: int, seed: int) -> NDArray[np.int64]:
    """A permutation that depends on epoch and seed alone; ``Task.order`` of most tasks."""
    return np.random.default_rng([seed, epoch]).permutation(rows).astype(np.int64)


def fit(
    task: TrainingTask,
    config: FitConfig,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    every_s: float = 30.0,
    progress: Progress | None = None,
) -> Fitted:
    """Train ``task.module`` in place.

    A checkpoint is written every ``every_s`` seconds, at the end of each epoch and on an interrupt.

    Raises:
        WeightsError: if ``resume`` finds no checkpoint, a damaged one, or one of another training.
        WriteError: if a checkpoint cannot be written; the one before stays.
        DataError: if the loss is no longer a number.
    """
    if task.rows == 0:
        raise DataError("there are no rows to train on", mend="Give more data, or leave less of it out")
    run = _Training(task, config, checkpoint)
    if resume:
        run.restore()
    else:
        torch.manual_seed(config.seed)
    saved = time.monotonic()
    try:
        for _ in run.steps():
            if progress is not None:
                progress(run.told(), run.share())
            if checkpoint is not None and (time.monotonic() - saved > every_s or run.place == 0):
                run.save()
                saved = time.monotonic()
    except KeyboardInterrupt:
        if checkpoint is not None:
            run.save()
        raise
    run.finish()
    return run.fitted


class _Training:
    """A training under way: the optimizer, where in which epoch it is, averaged weights."""

    def __init__(self, task: TrainingTask, config: FitConfig, checkpoint: Path | None) -> None:
        self.task, self.config, self.checkpoint = task, config, checkpoint
        self.parameters = [p for p in task.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.per_epoch = math.ceil(task.rows / config.batch_rows)
        self.epoch, self.place = 0, 0  # the next step to take
        self.average = [p.detach().clone() for p in self.parameters] if config.ema else []
        self.recent: list[float] = []
        self.total = 0.0  # of the losses of this epoch
        self.fitted = Fitted()

    def share(self) -> float:
        """How much of the training is done, in 0 … 1."""
        config = self.config
        steps = self.fitted.steps / (config.epochs * self.per_epoch)
        return min(1.0, steps if config.budget_s is None else max(steps, self.fitted.seconds / config.budget_s))

    def told(self) -> str:
        """For a progress bar."""
        mean = sum(self.recent) / max(1, len(self.recent))
        return f"epoch {min(self.epoch + 1, self.config.epochs)} of {self.config.epochs}, loss {mean:.4f}"

    def steps(self) -> Iterator[None]:
        """Take the steps that are left."""
        rows = self.config.batch_rows
        while self.epoch < self.config.epochs and self.share() < 1.0:
            order = self.task.order(self.epoch, self.config.seed)
            while self.place < self.per_epoch and self.share() < 1.0:
                started = time.monotonic()
                self._step(order[self.place * rows : (self.place + 1) * rows])
                self.fitted.seconds += min(time.monotonic() - started, PAUSE_S)
                self.place += 1
                if self.place == self.per_epoch or self.share() >= 1.0:
                    self.fitted.losses.append(self.total / self.place)
                    self.epoch, self.place, self.total = self.epoch + 1, 0, 0.0
                    yield
                    break
                yield

    def _step(self, rows: NDArray[np.int64]) -> None:
        config = self.config
        rate = config.learning_rate * _schedule(self.share(), config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        kind = self.parameters[0].device.type
        with torch.autocast(kind, torch.bfloat16, enabled=config.bf16):
            loss = self.task.loss(rows)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DataError(
                f"the loss is {value} at step {self.fitted.steps}", mend="Lower --learning-rate, or look at the data"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, config.clip)
        self.optimizer.step()
        self.fitted.steps += 1
        self.total += value
        self.recent = [*self.recent[1 - KEEPS :], value]
        if self.average:
            decay = min(config.ema, (1 + self.fitted.steps) / (10 + self.fitted.steps))
            with torch.no_grad():
                for mean, parameter in zip(self.average, self.parameters, strict=True):
                    mean.lerp_(parameter, 1.0 - decay)

    def finish(self) -> None:
        """The averaged weights are the result."""
        with torch.no_grad():
            for parameter, mean in zip(self.parameters, self.average, strict=False):
                parameter.copy_(mean)

    def identity(self) -> dict[str, Any]:
        """Of config and task, as it is after a round through JSON."""
        text = json.dumps({"config": asdict(self.config), "task": dict(self.task.identity())}, sort_keys=True)
        loaded: dict[str, Any] = json.loads(text)
        return loaded

    def save(self) -> None:
        """Write the checkpoint."""
        assert self.checkpoint is not None
        arrays = {f"module.{name}": _array(value) for name, value in self.task.module.state_dict().items()}
        arrays |= {f"average.{i}": _array(value) for i, value in enumerate(self.average)}
        for i, parameter in enumerate(self.parameters):
            state = self.optimizer.state.get(parameter, {})
            arrays |= {f"optimizer.{i}.{name}": _array(value) for name, value in state.items()}
        arrays["random"] = _array(torch.get_rng_state())
        head = {
            "identity": self.identity(),
            "epoch": self.epoch,
            "place": self.place,
            "total": self.total,
            "recent": self.recent,
            **asdict(self.fitted),
        }
        save_checkpoint(self.checkpoint, arrays, head)

    def restore(self) -> None:
        """Go on where the checkpoint was written."""
        assert self.checkpoint is not None, "resume needs a checkpoint"
        loaded = load_checkpoint(self.checkpoint)
        found, wanted = loaded.description.get("identity"), self.identity()
        if found != wanted:
            raise WeightsError(
                f"{self.checkpoint} is of another training: {_difference(found, wanted)}",
                "A checkpoint goes on with the data and options that it was begun with",
                "Give the same options, or train without --resume",
            )
        try:
            self._take(loaded.arrays, loaded.description)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            told = " ".join(str(error).split())[:120]
            what = f"{self.checkpoint} does not fit this training ({told})"
            raise WeightsError(what, mend="Train without --resume") from error

    def _take(self, arrays: Arrays, head: Mapping[str, Any]) -> None:
        prefix = "module."
        state = {name.removeprefix(prefix): _tensor(arrays[name]) for name in arrays if name.startswith(prefix)}
        self.task.module.load_state_dict(state)
        with torch.no_grad():
            for i, mean in enumerate(self.average):
                mean.copy_(_tensor(arrays[f"average.{i}"]))
        for i, parameter in enumerate(self.parameters):
            prefix = f"optimizer.{i}."
            found = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
            if found:
                self.optimizer.state[parameter] = {
                    name: _tensor(value).to(parameter.device) for name, value in found.items()
                }
        torch.set_rng_state(_tensor(arrays["random"]))
        self.epoch, self.place, self.total = int(head["epoch"]), int(head["place"]), float(head["total"])
        self.recent = [float(value) for value in head["recent"]]
        self.fitted = Fitted([float(loss) for loss in head["losses"]], int(head["steps"]), float(head["seconds"]))


def _schedule(share: float, warmup: float) -> float:
    """Of the highest learning rate: up in a line, down along a cosine."""
    if share < warmup:
        return max(LAST, share / warmup)
    return LAST + (1.0 - LAST) * 0.5 * (1.0 + math.cos(math.pi * (share - warmup) / (1.0 - warmup)))


def _array(value: Tensor) -> NDArray[Any]:  # Any: of each dtype
    array: NDArray[Any] = value.detach().cpu().numpy()
    return array


def _tensor(array: NDArray[Any]) -> Tensor:  # Any: of each dtype
    return torch.from_numpy(np.array(array))  # a copy: what was read may be read-only


def _difference(found: object, wanted: Mapping[str, Any]) -> str:
    """The first place where two identities differ, in words."""
    for part, values in wanted.items():
        there = found.get(part) if isinstance(found, dict) else None
        if isinstance(there, dict):
            for name in values:
                if there.get(name) != values[name]:
                    return f"{name} was {json.dumps(there.get(name))[:60]}, and is {json.dumps(values[name])[:60]}"
    return "it says nothing of how it was made"
