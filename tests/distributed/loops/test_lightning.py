"""Lightning's Trainer trains emitted models on four processes as on one, and goes on under another plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ir.errors import UsageError, WeightsError
from tests.distributed.harness import run_ranks
from tests.distributed.loops.plans import RESUMED, ROWS, STEPS, Texts, build

pytest.importorskip("lightning")
pytestmark = pytest.mark.distributed
Packages = Callable[[str], Path]
Answer = tuple[list[float], float, dict[str, Tensor]]
EPOCHS = 4
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def module(model: Any) -> Any:
    """GPT-2 with AdamW and a schedule; it notes its losses."""
    from pdv.loops.lightning import PdvModule

    class Gpt2(PdvModule):
        losses: tuple[float, ...] = ()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-5)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses += (float(outputs["loss"]),)

    return Gpt2(model)


def loaders(accumulate: int) -> tuple[Any, Any]:
    """The same whole batches on every rank, in each epoch's own order."""
    texts, rows = Texts(ROWS * STEPS // EPOCHS), ROWS // accumulate
    order = DistributedSampler(texts, num_replicas=1, rank=0, seed=5)
    return DataLoader(texts, batch_size=rows, sampler=order), DataLoader(Texts(13), batch_size=5)


def run(built: Path, checkpoint: Path, accumulate: int, epochs: int, resume: Path | None) -> Answer:
    """Losses, loss of the evaluation, weights; saved at the end."""
    import warnings

    from lightning.pytorch import Trainer

    from pdv.loops.lightning import PdvStrategy

    warnings.simplefilter("ignore")  # Lightning's, of workers of loaders
    own = module(build(built))
    trainer = Trainer(
        strategy=PdvStrategy(own.model), accelerator="cpu", max_epochs=epochs, gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate, num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip
    train, held_out = loaders(accumulate)
    trainer.fit(own, train, held_out, ckpt_path=resume)
    trainer.save_checkpoint(checkpoint)
    (told,) = trainer.validate(own, held_out, verbose=False)
    assert trainer.global_step == epochs * STEPS // EPOCHS
    return list(own.losses), told["val_loss"], {name: x.clone() for name, x in own.model.full_state_dict().items()}


@pytest.mark.parametrize(("first", "second", "accumulate"), RESUMED)
def test_twenty_steps_on_four_processes_are_those_of_one(
    first: str, second: str, accumulate: int, packages: Packages, tmp_path: Path
) -> None:
    losses, evaluated, weights = run_ranks(run, 1, packages(first), tmp_path / "one", accumulate, EPOCHS, None)[0]
    assert len(losses) == STEPS * accumulate
    half = len(losses) // 2
    begun = run_ranks(run, 4, packages(first), tmp_path / "half.ckpt", accumulate, EPOCHS // 2, None)
    ended = run_ranks(run, 4, packages(second), tmp_path / "end.ckpt", accumulate, EPOCHS, tmp_path / "half.ckpt")
    for answer in begun:
        assert answer[0] == pytest.approx(losses[:half], abs=1e-4)
    for answer in ended:
        assert answer[0] == pytest.approx(losses[half:], abs=1e-4)
        assert answer[1] == pytest.approx(evaluated, abs=1e-4)
        for name, tensor in answer[2].items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on loaders
def test_what_cannot_be_had_is_refused_by_name(packages: Packages, tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    from pdv.loops.lightning import PdvStrategy

    own = module(build(packages("hybrid")))
    train, _ = loaders(1)
    for wanted, match in (
        ({"strategy": "auto"}, "SingleDeviceStrategy"),
        ({"precision": "bf16-mixed"}, "precision='bf16-mixed'"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
    ):
        given = {"strategy": PdvStrategy(own.model), **wanted}
        with pytest.raises(UsageError, match=match):
            Trainer(accelerator="cpu", max_steps=1, **given, **QUIET).fit(own, train)
    trainer = Trainer(strategy=PdvStrategy(own.model), accelerator="cpu", max_steps=1, **QUIET)
    with pytest.raises(UsageError, match="without labels"):
        trainer.fit(own, DataLoader([{"input_ids": torch.zeros(8, dtype=torch.int64)}] * ROWS, batch_size=ROWS))
    (tmp_path / "half.ckpt").mkdir()
    with pytest.raises(WeightsError, match="unfinished"):
        trainer.fit(own, train, ckpt_path=tmp_path / "half.ckpt")
    own.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"extra\.weight"):
        trainer.fit(own, train)
