"""Train a package of a language model with Hugging Face's Trainer: on four processes, or unsharded on one.

torchrun --nproc-per-node=4 examples/huggingface.py gpt2_pdv
torchrun --nproc-per-node=4 examples/huggingface.py gpt2_pdv --resume out/checkpoint-10
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import torch
from text import Texts
from transformers import TrainingArguments

from pdv.loops.huggingface import PdvTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("package", type=Path)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=4, help="rows of the whole batch")
parser.add_argument("--sequence", type=int, default=64, help="tokens of a row")
parser.add_argument("--vocabulary", type=int, default=50257)
parser.add_argument("--out", default="out")
parser.add_argument("--resume", help="a checkpoint that any plan of the model saved")
options = parser.parse_args()


sys.path.insert(0, str(options.package.resolve().parent))
model = import_module(options.package.name).build()  # joins the processes that torchrun started
world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
if options.batch % world:
    sys.exit(f"--batch {options.batch}: the Trainer counts rows by process. Take a multiple of {world}.")
args = TrainingArguments(
    output_dir=options.out,
    max_steps=options.steps,
    per_device_train_batch_size=options.batch // world,
    per_device_eval_batch_size=options.batch // world,
    learning_rate=3e-4,
    warmup_steps=2,
    logging_steps=1,
    save_steps=max(1, options.steps // 2),
    eval_strategy="steps",
    eval_steps=max(1, options.steps // 2),
    dataloader_drop_last=True,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
sizes = options.sequence, options.vocabulary
trainer = PdvTrainer(model, args, train_dataset=Texts(64, *sizes, seed=0), eval_dataset=Texts(13, *sizes, seed=1))
trainer.train(resume_from_checkpoint=options.resume)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
