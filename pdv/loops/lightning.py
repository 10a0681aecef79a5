"""Lightning's ``Trainer`` around an emitted model: a step is the package's ``train_step``, pipelines included.

Lightning keeps loops, callbacks, loggers, schedules and when to evaluate and to save. What makes several processes one
is the package's: rows, gradients, clipping, checkpoints. Entry points: ``PdvModule``, ``PdvStrategy``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from ir.errors import UsageError, WeightsError
from pdv.loops.checkpoint import load_checkpoint, save_checkpoint
from pdv.loops.evaluate import Mean, evaluate
from pdv.loops.pieces import is_first, share
from pdv.loops.rows import CausalLoss, LossFn, check_alike, check_rows, trained_shapes_of

FOLDER, REST = "pdv", "rest.pt"
"""In a checkpoint, a folder: weights and the optimizer's state as every plan reads them; and what is Lightning's."""


class PdvModule(LightningModule):
    """A ``LightningModule`` whose model a package built; its ``Trainer`` has a ``PdvStrategy``.

    loss_fn: as ``train_step`` of the package takes it; default is that of a causal language model whose labels are its
    inputs. A batch is the inputs and behind them what the loss compares with, or a dict by their names and ``label``:
    the whole batch, on every rank. ``configure_optimizers`` is left to who derives from it.

    Raises:
        UsageError: when training starts, naming what cannot be had with an emitted model.
    """

    def __init__(self, model: Any, loss_fn: LossFn | None = None, *, label: str = "labels") -> None:
        super().__init__()
        self.model, self.label = model, label
        self.names = (*trained_shapes_of(model), label)
        self.loss_fn: Any = CausalLoss() if loss_fn is None else loss_fn
        self.told = Mean()

    @override
    def setup(self, stage: str) -> None:
        _check(self, self.trainer)

    # ---- A step: what Lightning calls behind it has been done in it ----

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Forward, loss and backward of one whole batch; the loss of it, on every rank."""
        *inputs, target = self._given(batch)
        check_rows(self.model, inputs[0].size(0))
        if batch_idx % 100 == 0:
            check_alike([*inputs, target])
        if batch_idx % (parts := self.trainer.accumulate_grad_batches) == 0:
            self.model.zero_grad()
        loss: Tensor = self.model.train_step(inputs, target, _part_of(self.loss_fn, parts)) * parts
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def backward(self, *_: Any, **__: Any) -> None:
        """Nothing: ``train_step`` has gone backward."""

    @override
    def optimizer_zero_grad(self, *_: Any, **__: Any) -> None:
        """Nothing: Lightning asks for it behind the step that has made them."""

    @override
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By the norm over all ranks and stages."""
        if gradient_clip_val:
            self.model.clip_grad_norm_(float(gradient_clip_val))

    # ---- Evaluation: of rows, not of batches ----

    @override
    def on_validation_epoch_start(self) -> None:
        self.told = Mean()

    on_test_epoch_start = on_validation_epoch_start

    @override
    def validation_step(self, batch: Any, *_: Any) -> None:
        with torch.inference_mode(mode=False):  # a loss is asked for its terms, which takes a graph
            *inputs, target = (x.clone() for x in self._given(batch))
            terms, _ = evaluate(self.model, inputs, target, self.loss_fn, outputs=False)
            if terms is not None:
                self.told.add(terms)

    test_step = validation_step

    @override
    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.told.value(), prog_bar=True)

    @override
    def on_test_epoch_end(self) -> None:
        self.log("test_loss", self.told.value())

    @override
    def predict_step(self, batch: Any, *_: Any) -> Any:
        """Outputs of the whole batch, on every rank."""
        return evaluate(self.model, self._given(batch, labels=False))[1]

    def _given(self, batch: Any, *, labels: bool = True) -> list[Tensor]:
        """Inputs in the model's order, and behind them what the loss compares with."""
        names = self.names if labels else self.names[:-1]
        if isinstance(batch, Mapping) and (missing := [name for name in names if name not in batch]):
            has = ", ".join(sorted(batch))
            raise UsageError(f"a batch without {missing[0]}", f"{', '.join(names)}; it has {has}", "Mend the collator")
        given = [batch[name] for name in names] if isinstance(batch, Mapping) else list(batch)[: len(names)]
        if len(given) < len(names):
            raise UsageError(f"a batch of {len(given)} tensors", f"{len(names)}: {', '.join(names)}", "Mend the loader")
        return given


class PdvStrategy(SingleDeviceStrategy):
    """Processes that torchrun started and ``build`` joined: for Lightning one device, which sees the whole batch."""

    strategy_name = "pdv"

    def __init__(self, model: Any) -> None:
        super().__init__(device=model.mesh.device)
        self.built = model
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if dist.is_initialized() else 0

    @override
    def setup_environment(self) -> None:
        rank_zero_only.rank = self.global_rank
        super().setup_environment()

    @property
    @override
    def is_global_zero(self) -> bool:
        return is_first()

    @override
    def model_to_device(self) -> None:
        """Nothing: a package builds its model where it belongs."""

    @override
    def teardown(self) -> None:
        """The model stays where it is."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @override
    def barrier(self, *_: Any, **__: Any) -> None:
        share(None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return share(obj)[src]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        said = share(bool(decision))
        return False not in said if all else True in said

    # ---- Checkpoints: all ranks write, every plan reads ----

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # there are optimizers then

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Nothing: ``load_checkpoint`` has."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        folder = Path(self.broadcast(os.fspath(filepath)))
        rest, part = folder / REST, folder / f".{REST}.part"
        if is_first():
            rest.unlink(missing_ok=True)  # what is half written has none
        optimizer = self.optimizers[0] if checkpoint.get("optimizer_states") else None
        save_checkpoint(folder / FOLDER, self.built, optimizer, overwrite=True)
        if is_first():
            torch.save(checkpoint, part)
            part.replace(rest)
        self.barrier()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What is Lightning's, read by torch's weights-only reader; weights and the optimizer's state are taken."""
        folder = Path(self.broadcast(os.fspath(checkpoint_path)))
        if not (folder / REST).is_file():
            raise WeightsError(
                f"{folder} has no {REST}: it is unfinished, or not of a PdvStrategy",
                f"A folder that it wrote, which has {FOLDER} and {REST}",
                "Take an earlier one; weights of other kinds are for pdv.loops.pretrained",
            )
        found: dict[str, Any] = torch.load(folder / REST, weights_only=True)
        with_optimizer = self.optimizers and found.get("optimizer_states")
        load_checkpoint(folder / FOLDER, self.built, self.optimizers[0] if with_optimizer else None)
        return found


def _part_of(loss_fn: Any, parts: int) -> Any:
    """The loss of one of several batches whose gradients are summed, as Lightning weighs them: each alike."""
    if parts == 1:
        return loss_fn

    def part(output: Any, target: Any) -> Any:
        loss = loss_fn(output, target)
        return (loss[0] / parts, *loss[1:]) if isinstance(loss, tuple) else loss / parts

    return part


def _check(module: PdvModule, trainer: Any) -> None:
    """Whether a ``Trainer`` asks for what an emitted model can do."""
    if not isinstance(trainer.strategy, PdvStrategy):
        how = type(trainer.strategy).__name__
        raise UsageError(
            f"{how} with an emitted model: how parameters and rows are cut is the plan's",
            "PdvStrategy(model), on processes that torchrun started",
            "Trainer(strategy=PdvStrategy(model))",
        )
    plan = "Plan it (--precision mixed, --dtype bfloat16)"
    if trainer.precision != "32-true":
        what = f"precision={trainer.precision!r} with an emitted model"
        raise UsageError(f"{what}: the package computes as it was planned", "32-true", plan)
    if str(getattr(how := trainer.gradient_clip_algorithm, "value", how)).lower() not in ("none", "norm"):
        raise UsageError("gradient_clip_algorithm='value' with an emitted model", "norm", "Clip by the norm")
    held = {id(x) for x in module.model.parameters()}
    if others := [name for name, x in module.named_parameters() if id(x) not in held]:
        what = f"{others[0]} beside the emitted model: no rank would hear of the others' gradients of it"
        raise UsageError(what, "Parameters of the emitted model alone", "Plan the module with it")


__all__ = ["FOLDER", "PdvModule", "PdvStrategy"]
