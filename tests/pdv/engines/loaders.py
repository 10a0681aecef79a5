"""What an engine's own loader makes of its files, in a process of its own: `loaders.py ENGINE FILE …` prints JSON."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

WORLD = 8


def accelerate(path: Path) -> dict[str, Any]:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    found = load_config_from_file(str(path))
    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    launched = _validate_launch_command(args)[0]
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in (found.parallelism_config or {}).items()}
    return {
        "kind": found.distributed_type.value, "devices": launched.num_processes, "version": launched.fsdp_version,
        "resharded": launched.fsdp_reshard_after_forward, "precision": launched.mixed_precision, **sizes,
    }  # fmt: skip


def transformers(path: Path) -> dict[str, Any]:
    from transformers.distributed import DistributedConfig

    found = DistributedConfig.from_dict(json.loads(path.read_text()))
    return {name: getattr(found, name) for name in ("tp_size", "fsdp_size", "dp_replicate_size", "tp_plan")}


def deepspeed(path: Path) -> dict[str, Any]:
    import deepspeed.comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    said = json.loads(path.read_text())
    pp = said.get("pipeline", {}).get("stages", 1)

    class Units:  # of a PipelineModule, which brings them
        def get_data_parallel_world_size(self) -> int:
            return int(WORLD // pp)

    dist.get_rank = lambda *_, **__: 0  # nothing is started: a configuration alone
    dist.get_world_size = lambda *_, **__: WORLD
    found = DeepSpeedConfig(said, mpu=Units() if pp > 1 else None)
    return {
        "stage": found.zero_config.stage, "batch": found.train_batch_size,
        "micro_batch": found.train_micro_batch_size_per_gpu, "steps": found.gradient_accumulation_steps,
        "bfloat16": bool(found.bfloat16_config.enabled),
    }  # fmt: skip


def torchtitan(path: Path) -> dict[str, Any]:
    from torchtitan.config import ConfigManager

    words = shlex.split(path.read_text().partition("torchtitan.train")[2].replace("\\\n", " "))
    words = [word for word in words if word != "$@"]
    found = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *words])
    own, training = found.parallelism, found.training
    return {
        "tp": own.tensor_parallel_degree, "pp": own.pipeline_parallel_degree, "cp": own.context_parallel_degree,
        "copies": own.data_parallel_replicate_degree, "shard": own.data_parallel_shard_degree,
        "sp": own.enable_sequence_parallel, "resharded": own.fsdp_reshard_after_forward,
        "schedule": own.pipeline_parallel_schedule, "batch": training.global_batch_size,
    }  # fmt: skip


if __name__ == "__main__":
    load = {"accelerate": accelerate, "hf-tp-plan": transformers, "deepspeed": deepspeed, "torchtitan": torchtitan}
    print(json.dumps({name: load[sys.argv[1]](Path(name)) for name in sys.argv[2:]}))
