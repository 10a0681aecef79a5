"""Train a package of a language model with Lightning: on four processes, or unsharded on one.

torchrun --nproc-per-node=4 examples/lightning_loop.py gpt2_pdv
torchrun --nproc-per-node=4 examples/lightning_loop.py gpt2_pdv --epochs 4 --resume out/last.ckpt
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from text import Texts
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from pdv.loops.lightning import PdvModule, PdvStrategy

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("package", type=Path)
parser.add_argument("--epochs", type=int, default=2, help="of 10 steps")
parser.add_argument("--batch", type=int, default=4, help="rows of the whole batch")
parser.add_argument("--sequence", type=int, default=64, help="tokens of a row")
parser.add_argument("--vocabulary", type=int, default=50257)
parser.add_argument("--out", default="out")
parser.add_argument("--resume", help="a checkpoint that any plan of the model saved")
options = parser.parse_args()


class LanguageModel(PdvModule):
    """With AdamW, and a schedule by steps."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


sys.path.insert(0, str(options.package.resolve().parent))
model = import_module(options.package.name).build()  # joins the processes that torchrun started
texts = Texts(10 * options.batch, options.sequence, options.vocabulary, seed=0)
order = DistributedSampler(texts, num_replicas=1, rank=0)  # every rank takes all rows, in each epoch's own order
trainer = Trainer(
    strategy=PdvStrategy(model),
    max_epochs=options.epochs,
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    logger=False,
    num_sanity_val_steps=0,
    callbacks=[ModelCheckpoint(options.out, save_last=True)],
)
trainer.fit(
    LanguageModel(model),
    DataLoader(texts, batch_size=options.batch, sampler=order),
    DataLoader(Texts(13, options.sequence, options.vocabulary, seed=1), batch_size=5),
    ckpt_path=options.resume,
)
if trainer.is_global_zero:
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
