"""Training by torchtitan's own Trainer, on CPUs: `torchrun train_torchtitan.py torchtitan.sh`.

The flags are parsed, the model is built, cut, loaded, trained and saved by torchtitan; its trained weights, too, are
held to those of one process. What its 0.3 wants of an accelerator and a CPU has not is answered here.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny import STEPS, make_model, report, train_alone
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.tools import utils as tools

CLOSE = 1e-4  # largest difference of a weight after training
ANSWERS = {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=4 << 30),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}
tools.device_type, tools.device_module = "cpu", torch.cpu  # without an accelerator it takes CUDA
for name, answer in ANSWERS.items():
    setattr(torch.cpu, name, lambda *_, answer=answer: answer)

from torchtitan.config import ConfigManager  # noqa: E402  (what it imports asks for the device)
from torchtitan.distributed import utils  # noqa: E402


def whole(step: Callable[..., None]) -> Callable[..., None]:
    """A schedule's step of torch up to 2.13, which cuts a batch itself, for micro-batches that are cut already."""

    def cut(
        arg_mbs: list[tuple[Tensor]] | None, kwarg_mbs: list[dict[str, Tensor]], target_mbs: list[Tensor] | None,
        **rest: Any,
    ) -> None:  # fmt: skip
        assert not any(kwarg_mbs), "the model takes ids alone"
        ids = [torch.cat(each) for each in zip(*(arg_mbs or []), strict=True)]
        step(*ids, target=torch.cat(target_mbs) if target_mbs else None, **rest)

    return cut


utils.set_pg_timeouts = lambda **_: None  # its barrier names a CUDA device
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:  # the other ranks wait for it where they meet, before they load
    make_model().save_pretrained("llama")
words = shlex.split(Path(sys.argv[1]).read_text().partition("torchtitan.train")[2].replace("\\\n", " "))
words = ["--dump_folder", f"{sys.argv[1]}.outputs", *(word for word in words if word != "$@")]
config = ConfigManager().parse_args(["--module", "llama_for_torchtitan", "--config", "tiny", *words])
trainer = config.build()
for module in (each for part in trainer.model_parts for each in part.modules()):
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first
if trainer.parallel_dims.pp_enabled and "arg_mbs" not in signature(trainer.pp_schedule.step).parameters:
    trainer.pp_schedule.step = whole(trainer.pp_schedule.step)
trainer.train()
trainer.close()
if rank == world - 1:  # in pipelines, the one that has the loss
    (file,) = Path(config.dump_folder, "checkpoint", f"step-{STEPS}").glob("model-*.safetensors")
    trained = load_file(file)
    model, _ = train_alone()
    expected = model.state_dict()
    assert set(trained) == set(expected), "all weights are saved, by transformers' names"
    apart = max((weight - expected[name]).abs().max().item() for name, weight in trained.items())
    print(f"weights {apart:.1e} apart")
    assert apart <= CLOSE, f"weights are {apart:.1e} apart"
    part = trainer.model_parts[-1]
    weight = part.layers["1"].feed_forward.w1.weight
    held = tuple(weight.to_local().shape) if isinstance(weight, DTensor) else tuple(weight.shape)
    schedule = f"{type(trainer.pp_schedule).__name__}, " if trainer.parallel_dims.pp_enabled else ""
    how = f"{schedule}{len(part.layers)} layers, {held} of {tuple(weight.shape)} on each of {world} ranks"
    report(trainer.metrics_processor.losses, how)
dist.destroy_process_group()
