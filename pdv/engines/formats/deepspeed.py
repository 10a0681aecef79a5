"""DeepSpeed: `ds_config.json` (ZeRO, AutoTP, the pipeline of a `PipelineModule`).

Sources: deepspeed 0.19, ``runtime/config.py`` and ``runtime/constants.py`` (the names), ``runtime/pipe/engine.py`` (no
ZeRO-2 or 3 beside stages), ``runtime/tensor_parallel/config.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ir.errors import UsageError
from pdv.engines.beside import beside, read_settings
from pdv.engines.engine import (
    Change,
    Engine,
    Found,
    Reading,
    Settings,
    Target,
    check_names,
    names,
    take_bool,
    take_int,
    take_mapping,
)
from pdv.engines.parsing import parse_json_object
from pdv.manual.configuration import Configuration

MICRO, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
READ = names(
    "bf16 fp16 fp32 zero_optimization tensor_parallel pipeline activation_checkpointing sequence_parallel_size"
    f" in_script {MICRO} {STEPS} {BATCH}"
)
OTHERS = names(  # that change no step as it is simulated, or are listed as unpriced below
    "optimizer scheduler steps_per_print wall_clock_breakdown gradient_clipping zero_allow_untested_optimizer amp"
    " zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor communication_data_type dump_state"
    " sparse_gradients tensorboard wandb comet csv_monitor flops_profiler comms_logger aio autotuning elasticity"
    " checkpoint data_types dataloader_drop_last memory_breakdown monitor_config data_efficiency seed"
    " curriculum_learning compression_training sparse_attention progressive_layer_drop eigenvalue hybrid_engine nebula"
    " disable_allgather torch_autocast check_grad_overflow gradient_allreduce_op compile timers log_level checkpoint"
    " seq_parallel_communication_data_type use_data_before_expert_parallelism expert_parallel load_universal"
)
SLOWER = ("expert_parallel", "sparse_attention", "progressive_layer_drop", "compression_training", "sparse_gradients")
PIPELINE = names(
    "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant"
)
CHECKPOINTING = {"partition_activations": False, "contiguous_memory_optimization": False, "cpu_checkpointing": False}


class DeepSpeed(Engine):
    """ZeRO of every stage; tensor parallelism by AutoTP, or stages of a `PipelineModule`."""

    name = "deepspeed"
    file = "ds_config.json"
    start = "deepspeed train.py --deepspeed --deepspeed_config {file}"

    def limits(self, given: Configuration, target: Target) -> Iterator[Change]:
        """One micro-batch order, no interleaving, ZeRO-1 at most beside stages, no sequence parallelism of Megatron."""
        if given.vp > 1 or given.schedule != "1f1b":
            yield Change({"schedule": "1f1b", "vp": 1, "partition": None}, "its pipeline engine runs 1F1B alone")
        if given.pp > 1 and given.tp > 1:
            yield Change({"tp": 1, "sp": False}, "AutoTP is for models that are no PipelineModule")
        if given.sp:
            yield Change({"sp": False}, "AutoTP keeps norms and residuals whole")
        if given.pp > 1 and given.zero > 1:
            yield Change({"zero": 1}, "ZeRO-2 and ZeRO-3 do not go with its pipelines")
        if given.ep > 1:
            yield Change({"ep": 1}, "experts are spread by its MoE layer in the model's own code")
        if given.shard is not None:
            yield Change({"shard": None}, "ZeRO-3 cuts over all data-parallel ranks")
        if given.partition is not None:
            yield Change({"partition": None}, "stages are cut by its own count of parameters")
        if given.recompute not in ("none", "full"):
            yield Change({"recompute": "full"}, "its activation checkpointing is of whole layers")
        wanted = _precision(target.dtype, given.zero)
        if given.precision != wanted:
            yield Change({"precision": wanted}, f"so it keeps parameters of {target.dtype} at ZeRO-{given.zero}")

    def in_script(self, given: Configuration) -> Mapping[str, str]:
        """Recomputation of a model that is no pipeline."""
        said = {}
        if given.pp > 1:
            said["pp"] = f"PipelineModule(layers, num_stages={given.pp})"
        if given.recompute == "full" and given.pp == 1:
            said["recompute"] = "model.gradient_checkpointing_enable()"
        return said

    def write(self, given: Configuration, target: Target) -> str:
        """As its manual writes it."""
        said: dict[str, Any] = {MICRO: given.micro_batch, STEPS: given.micro_batches}
        if given.tp == 1:  # else it counts all ranks as data-parallel ones, unless it is given an mpu
            said = {BATCH: given.batch, **said}
        said["zero_optimization"] = {"stage": given.zero, "overlap_comm": given.gradients}
        if target.dtype != "float32":
            said["bf16" if target.dtype == "bfloat16" else "fp16"] = {"enabled": True}
        if given.tp > 1:
            said["tensor_parallel"] = {"autotp_size": given.tp}
        if given.cp > 1:
            said["sequence_parallel_size"] = given.cp
        if given.pp > 1:
            interval = int(given.recompute == "full")
            said["pipeline"] = {"stages": given.pp, "activation_checkpoint_interval": interval}
        elif given.recompute == "full":
            said["activation_checkpointing"] = CHECKPOINTING
        if script := beside(given, (name for name in self.in_script(given) if name == "recompute")):
            said["in_script"] = script
        return json.dumps(said, indent=2) + "\n"

    def read(self, text: str, reading: Reading) -> Found:
        """The same back; ``auto`` of Hugging Face's Trainer leaves a setting open."""
        said = parse_json_object(text, self.name)
        check_names(said, READ | OTHERS, "ds_config.json")
        settings, unpriced = _read_zero(said.get("zero_optimization", {}))
        tensor = take_mapping(said.get("tensor_parallel", {}), "tensor_parallel")
        stages = take_mapping(said.get("pipeline", {}), "pipeline")
        check_names(stages, PIPELINE, "pipeline")
        if not _is_open(tensor.get("autotp_size", "auto")):
            settings["tp"] = max(take_int(tensor["autotp_size"], "autotp_size", least=0), 1)
        if not _is_open(stages.get("stages", "auto")):
            settings["pp"] = take_int(stages["stages"], "pipeline.stages")
        if take_int(stages.get("activation_checkpoint_interval", 0), "activation_checkpoint_interval", least=0):
            settings["recompute"] = "full"
        if "activation_checkpointing" in said:
            settings["recompute"] = "full"
        if "sequence_parallel_size" in said:
            settings["cp"] = take_int(said["sequence_parallel_size"], "sequence_parallel_size")
            unpriced += ["sequence_parallel_size (Ulysses: simulated as context parallelism)"][: settings["cp"] - 1]
        dtype = "bfloat16" if _is_on(said, "bf16") else "float16" if _is_on(said, "fp16") else None
        settings["precision"] = _precision(dtype or "float32", settings["zero"])
        settings |= _read_batch(said, settings, reading.devices)
        settings |= read_settings(str(said["in_script"])) if "in_script" in said else {}
        unpriced += [name for name in SLOWER if said.get(name)]
        unread = tuple(name for name in said if name in OTHERS and name not in SLOWER)
        return Found(settings, dtype, tuple(unpriced), unread)


def _precision(dtype: str, zero: int) -> str:
    """BF16_Optimizer holds gradients twice; from ZeRO-2 on they are of compute's type."""
    if dtype == "float32":
        return "as-emitted"
    return "mixed-half-gradients" if zero > 1 else "mixed-two-gradients"


def _is_open(value: object) -> bool:
    return value == "auto"


def _is_on(said: Mapping[str, Any], name: str) -> bool:
    value = take_mapping(said.get(name, {}), name).get("enabled", False)
    return not _is_open(value) and take_bool(value, f"{name}.enabled")


def _read_zero(value: object) -> tuple[Settings, list[str]]:
    said = take_mapping(value, "zero_optimization")
    stage = said.get("stage", 0)
    if not isinstance(stage, int) or stage not in range(4):
        raise UsageError(f"zero_optimization.stage is {stage!r}", "Allowed: 0, 1, 2, 3")
    unpriced = [
        f"zero_optimization.{name}"
        for name in ("offload_optimizer", "offload_param")
        if take_mapping(said.get(name) or {}, name).get("device", "none") != "none"
    ]
    hpz = take_int(said.get("zero_hpz_partition_size", 1), "zero_hpz_partition_size")
    mics = said.get("mics_shard_size", -1)
    for name, used in (("zero_hpz_partition_size", hpz > 1), ("mics_shard_size", mics != -1)):
        unpriced += [f"zero_optimization.{name}"] if used else []
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        unpriced += [f"zero_optimization.{name}"] if said.get(name) is True else []
    overlap = said.get("overlap_comm", stage == 3)
    return {"zero": stage, "gradients": _is_open(overlap) or take_bool(overlap, "overlap_comm")}, unpriced


def _read_batch(said: Mapping[str, Any], settings: Settings, devices: int) -> Settings:
    """Batch, micro-batch and steps: two of them say the third.

    With AutoTP and without an ``mpu`` DeepSpeed wants the batch of all ranks, as if each had rows of its own.

    Raises:
        UsageError: if they are not those of so many devices.
    """
    numbers = {
        name: take_int(said[name], name) for name in (BATCH, MICRO, STEPS) if name in said and not _is_open(said[name])
    }
    others = settings.get("tp", 1) * settings.get("pp", 1) * settings.get("cp", 1)
    if devices % others:
        raise UsageError(f"tp x pp x cp = {others} devices do not divide {devices}")
    ranks = devices // others
    batch, micro, steps = (numbers.get(name) for name in (BATCH, MICRO, STEPS))
    if batch is None and micro is None:
        return {}
    if micro is None:
        assert batch is not None, "as the line above says"
        micro = batch // (ranks * (steps or 1))
    if batch is None:
        batch = micro * ranks * (steps or 1)
    if micro and batch == micro * ranks * (steps or 1) * settings.get("tp", 1):
        batch = micro * ranks * (steps or 1)
    if not micro or batch % (micro * ranks) or (steps is not None and batch != micro * ranks * steps):
        text = f"{BATCH}={batch}, {MICRO}={micro}, {STEPS}={steps or '-'}"
        raise UsageError(
            f"{text} on {ranks} data-parallel ranks ({devices} devices)",
            f"Allowed: {BATCH} = {MICRO} x {STEPS} x ranks",
            "Give --cluster the cluster that the file is for",
        )
    return {"batch": batch, "micro_batch": micro}
