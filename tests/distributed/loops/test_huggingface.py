"""Hugging Face's Trainer trains emitted models on four processes as on one, and goes on under another plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ir.errors import UsageError
from tests.distributed.harness import run_ranks
from tests.distributed.loops.plans import RESUMED, ROWS, STEPS, Texts, build, gpt2_config

pytest.importorskip("accelerate")
pytestmark = pytest.mark.distributed
Packages = Callable[[str], Path]
Answer = tuple[dict[int, float], float, dict[str, Tensor]]


def trainer(built: Path, folder: Path, *, accumulate: int, stop: int = 0) -> Any:
    """Of GPT-2, whose step takes 8 rows, or two batches of 4; it stops behind step ``stop``."""
    import os

    from transformers import TrainerCallback, TrainingArguments

    from pdv.loops.huggingface import PdvTrainer

    class Stop(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step == stop

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # as torchrun does; the group is there already
    args = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.5,
        warmup_steps=3, per_device_train_batch_size=ROWS // accumulate // int(os.environ["WORLD_SIZE"]),
        adam_epsilon=1e-5,
        per_device_eval_batch_size=2, gradient_accumulation_steps=accumulate, logging_steps=1, save_steps=STEPS // 2,
        report_to=[], use_cpu=True, disable_tqdm=True, dataloader_drop_last=True,
    )  # fmt: skip
    return PdvTrainer(
        build(built), args, train_dataset=Texts(60), eval_dataset=Texts(13), config=gpt2_config(), callbacks=[Stop()]
    )


def run(built: Path, folder: Path, accumulate: int, stop: int, resume: Path | None) -> Answer:
    """Losses by step, loss of the evaluation, weights."""
    made = trainer(built, folder, accumulate=accumulate, stop=stop)
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses = {entry["step"]: entry["loss"] for entry in made.state.log_history if "loss" in entry}
    return losses, made.evaluate()["eval_loss"], {k: v.clone() for k, v in made.model.full_state_dict().items()}


@pytest.mark.parametrize(("first", "second", "accumulate"), RESUMED)
def test_twenty_steps_on_four_processes_are_those_of_one(
    first: str, second: str, accumulate: int, packages: Packages, tmp_path: Path
) -> None:
    whole = run_ranks(run, 1, packages(first), tmp_path / "one", accumulate, 0, None)[0]
    assert len(whole[0]) == STEPS
    half = STEPS // 2
    begun = run_ranks(run, 4, packages(first), tmp_path / "four", accumulate, half, None)
    checkpoint = tmp_path / "four" / f"checkpoint-{half}"
    ended = run_ranks(run, 4, packages(second), tmp_path / "other", accumulate, 0, checkpoint)
    for answer in begun:
        assert [answer[0][step] for step in range(1, half + 1)] == pytest.approx(
            [whole[0][step] for step in range(1, half + 1)], abs=1e-4
        )
    for losses, evaluated, weights in ended:
        assert losses.keys() == whole[0].keys()
        assert list(losses.values()) == pytest.approx(list(whole[0].values()), abs=1e-4)
        assert evaluated == pytest.approx(whole[1], abs=1e-4)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, whole[2][name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bf16_full_eval", True), ("gradient_checkpointing", True), ("label_smoothing_factor", 0.1),
     ("neftune_noise_alpha", 5.0), ("batch_eval_metrics", True), ("train_sampling_strategy", "group_by_length")],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(name: str, value: Any, packages: Packages, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from pdv.loops.huggingface import PdvTrainer

    given: dict[str, Any] = {"compute_metrics": lambda _: {}, "train_dataset": Texts(9)}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **{name: value})
    with pytest.raises(UsageError, match=name):
        PdvTrainer(build(packages("hybrid")), args, **given)


@pytest.mark.slow
def test_transformers_reads_what_the_trainer_saved(packages: Packages, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    _, _, weights = run_ranks(run, 4, packages("hybrid"), tmp_path, 1, STEPS // 2, None)[0]
    read: Any = GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS // 2}")
    for name, tensor in read.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=0, rtol=0)
