"""Hugging Face's ``Trainer`` around an emitted model: a step is the package's ``train_step``, pipelines included.

The Trainer keeps what it is good at: arguments, callbacks, logging, schedules, when to evaluate and to save. What
makes several processes one is the package's: rows, gradients, clipping, checkpoints. Entry point: ``PdvTrainer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_utils import has_length
from typing_extensions import override

from ir.errors import UsageError
from pdv.loops.checkpoint import load_checkpoint, save_checkpoint
from pdv.loops.evaluate import Mean, evaluate
from pdv.loops.pieces import is_first
from pdv.loops.rows import CausalLoss, LossFn, check_alike, check_rows, trained_shapes_of

FOLDER = "pdv"
"""In a checkpoint of the Trainer: weights and the optimizer's state as every plan reads them."""
PLANNED = "the package computes as it was planned (--precision mixed, --dtype bfloat16)"
CUTS = "how parameters are cut is the plan's"
AGAIN = "what is computed again is the plan's (--recompute)"
REFUSED = {
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), PLANNED),
    **dict.fromkeys(("fsdp", "deepspeed", "parallelism_config"), CUTS),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), AGAIN),
    "batch_eval_metrics": "metrics are of all rows at once",
    "label_smoothing_factor": "give a loss, as loss_fn",
    "auto_find_batch_size": "the plan was made for a batch that fits",
    "neftune_noise_alpha": "it hooks into a module that an emitted program does not have",
    "torch_compile": "call model.compile() before",
    "use_liger_kernel": "it replaces modules that an emitted program does not have",
}


class PdvTrainer(Trainer):
    """A ``Trainer`` whose model a package built.

    loss_fn: as ``train_step`` of the package takes it, of labels that the batch has; default is that of a causal
    language model. weigh: of labels, what all losses weigh (how many tokens count); asked for where gradients are
    accumulated. label: the name of labels in a batch. config: the source's, saved beside the weights.

    ``per_device_train_batch_size`` times the number of processes is the whole batch, which every rank loads.

    Raises:
        UsageError: naming an argument that cannot be had with an emitted model.
    """

    model: Any  # Any, here and below: the base class allows for what an emitted model never is
    lr_scheduler: Any
    _signature_columns: Any

    def __init__(
        self,
        model: Any,
        *args: Any,
        loss_fn: LossFn | None = None,
        weigh: Any = None,
        label: str = "labels",
        config: Any = None,
        **named: Any,
    ) -> None:
        self.inputs = tuple(trained_shapes_of(model))
        self.loss_fn: Any = CausalLoss() if loss_fn is None else loss_fn
        self.weigh = weigh or getattr(self.loss_fn, "weigh", None)
        self.label, self.config, self.told = label, config, Mean()
        _check_arguments(named.get("args", args[0] if args else None), named.get("compute_loss_func"))
        super().__init__(model, *args, **named)
        self.label_names = [label]
        self._signature_columns = [*self.inputs, label]
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise UsageError(f"accelerate's FSDP or DeepSpeed with an emitted model: {CUTS}", "torchrun", "Start it so")
        if self.weigh is None and self.args.gradient_accumulation_steps > 1:
            raise UsageError(
                "gradient_accumulation_steps of a loss whose weight is known behind it alone",
                "weigh, a function of the labels that gives the weight of their losses",
                "Give weigh, or plan micro-batches (--micro-batches)",
            )

    # ---- One process of several is the package's business ----

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """An accelerator that wraps neither model nor loaders: every rank passes the whole batch."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model
        self.accelerator.prepare_data_loader = lambda loader, **_: loader
        self.accelerator.no_sync = lambda model: model.no_sync() if _is_plain(model) else nullcontext()
        self.accelerator.gather = self.accelerator.gather_for_metrics = lambda values, **_: values  # each rank has all
        self.accelerator.pad_across_processes = lambda values, **_: values
        self.gather_function = self.accelerator.gather_for_metrics

    @override
    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Nothing: a package builds its model where it belongs."""

    @override
    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **named: Any) -> Any:
        """Of whole batches; no row is dropped where nothing is trained."""
        training, drop = bool(named.get("is_training")), self.args.dataloader_drop_last
        batch_size *= self.args.world_size
        if training:
            check_rows(self.model, batch_size)
            if has_length(dataset) and not drop:
                check_rows(self.model, len(dataset) % batch_size)
        self.args.dataloader_drop_last = drop and training
        try:
            return super()._get_dataloader(dataset, description, batch_size, *args, **named)
        finally:
            self.args.dataloader_drop_last = drop

    @override
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy == "sequential" or not has_length(dataset):
            return super()._get_train_sampler(dataset)
        return _Shuffled(dataset, self)

    # ---- A step ----

    @override
    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward, loss and backward of one whole batch; the loss of it, on every rank."""
        model.train()
        given = self._given(inputs)
        check_rows(model, given[0].size(0))
        if self.state.global_step % 100 == 0:
            check_alike(given)
        if num_items_in_batch is None or self.current_gradient_accumulation_steps == 1:
            loss: Tensor = model.train_step(given[:-1], given[-1], self.loss_fn)
            return loss
        total = float(num_items_in_batch)

        def share(output: Any, target: Any) -> Any:
            return self.loss_fn(output, target)[0] / total

        found: Tensor = model.train_step(given[:-1], given[-1], share, reduction="sum")
        return found

    def _given(self, inputs: dict[str, Any], *, labels: bool = True) -> list[Tensor]:
        """Inputs in the model's order, and labels behind them.

        Raises:
            UsageError: naming one that the batch does not have.
        """
        prepared = self._prepare_inputs(inputs)
        names = (*self.inputs, *([self.label] if labels else []))
        if missing := [name for name in names if name not in prepared]:
            has = ", ".join(sorted(prepared))
            raise UsageError(f"a batch without {missing[0]}", f"{', '.join(names)}; it has {has}", "Mend the collator")
        return [prepared[name] for name in names]

    @override
    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if self.weigh is None or len(batch_samples) < 2:
            return None
        return sum(self.weigh(batch[self.label]) for batch in batch_samples)

    @override
    def _clip_grad_norm(self, model: Any) -> Any:
        return model.clip_grad_norm_(self.args.max_grad_norm)

    @override
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    @override
    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Of those that decay: matrices; norms and biases have one dim, whatever they are called here."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]

    # ---- Evaluation ----

    @override
    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **named: Any) -> Any:
        """As the Trainer's; the loss is that of all rows, whatever the batches, and no mean of batches' means."""
        self.told = Mean()
        output: Any = super().evaluation_loop(dataloader, *args, **{**named, "metric_key_prefix": metric_key_prefix})
        if self.told.totals is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = self.told.value()
        return output

    @override
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """The loss of a whole batch, its outputs and its labels, on every rank."""
        has_labels = inputs.get(self.label) is not None
        given = self._given(inputs, labels=has_labels)
        labels = given.pop() if has_labels else None
        terms, output = evaluate(model, given, labels, self.loss_fn, outputs=not prediction_loss_only)
        if terms is None:
            return None, output, None
        self.told.add(terms)
        loss = (terms[0] / terms[1]).sum()
        return (loss, None, None) if prediction_loss_only else (loss, output, labels)

    # ---- Checkpoints: all ranks write, every plan reads ----

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights as ``from_pretrained`` reads them, and what is saved beside them."""
        folder = Path(output_dir or str(self.args.output_dir))
        self.model.save_safetensors(folder, overwrite=True)
        if is_first():
            for what in (self.config, self.processing_class):
                if what is not None:
                    what.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        loop = {"scheduler": self.lr_scheduler.state_dict()}
        save_checkpoint(Path(output_dir) / FOLDER, self.model, _inner(self.optimizer), loop=loop, overwrite=True)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.load_safetensors(resume_from_checkpoint)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "") / FOLDER
        if checkpoint is not None and folder.is_dir():  # else weights alone were saved (save_only_model)
            loop = load_checkpoint(folder, self.model, _inner(self.optimizer))
            self.lr_scheduler.load_state_dict(loop["scheduler"])

    @override
    def _load_best_model(self) -> None:
        self.model.load_safetensors(self.state.best_model_checkpoint)


def _check_arguments(args: Any, compute_loss: Any) -> None:
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise UsageError(f"{name} with an emitted model: {why}", f"Arguments without {name}", "Leave it out")
    if (way := getattr(args, "train_sampling_strategy", "random")) not in {"random", "sequential"}:
        raise UsageError(f"train_sampling_strategy={way!r}: ranks take one order", "random, sequential", "Take one")
    if compute_loss is not None:
        raise UsageError("compute_loss_func sees the rows of one rank", "loss_fn, of (sum, weight)", "Give loss_fn")


class _Shuffled(Sampler[int]):
    """Each epoch's own order, the same on all ranks, and after a resumption."""

    def __init__(self, dataset: Any, trainer: PdvTrainer) -> None:
        self.dataset = dataset
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        args = self.trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        generator = torch.Generator().manual_seed(seed + int(self.trainer.state.epoch or 0))
        order: Sequence[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
        return iter(order)


def _is_plain(model: Any) -> bool:
    """Whether gradients of a step may wait for those of the next."""
    return bool(model.micro_batches == 1 and model.mesh.stage.size == 1)


def _inner(optimizer: Any) -> Any:
    """What accelerate wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


__all__ = ["FOLDER", "PdvTrainer"]
