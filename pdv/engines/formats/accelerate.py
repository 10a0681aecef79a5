"""Hugging Face accelerate: the YAML file of `accelerate launch --config_file` (DDP, FSDP2, its parallelism_config).

Sources: accelerate 1.15, ``commands/config/config_args.py`` (names), ``parallelism_config.py`` (what goes together).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ir.errors import UsageError
from ir.files.plain_yaml import dump_yaml
from pdv.engines.beside import beside_line, read_beside
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
    take_word,
)
from pdv.engines.parsing import parse_yaml
from pdv.manual.configuration import Configuration

KNOWN = names(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids"
    " main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config"
    " deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone"
    " tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config"
)
KINDS = {"NO": "NO", "MULTI_CPU": "DDP", "MULTI_GPU": "DDP", "FSDP": "FSDP", "DEEPSPEED": "DEEPSPEED"}
STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "1": 3,
    "2": 2,
    "3": 0,
}  # of FSDP1, by torch's numbers
DTYPES = {"no": None, "bf16": "bfloat16", "fp16": "float16", "None": None}
WORDS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
SIZES = {"dp_replicate_size": "copies", "dp_shard_size": "shard", "tp_size": "tp", "cp_size": "cp"}
PREFIX = "parallelism_config_"


class Accelerate(Engine):
    """Data parallelism in all its kinds; tensor parallelism by the model's own plan; no stages."""

    name = "accelerate"
    file = "accelerate.yaml"
    start = "accelerate launch --config_file {file} train.py"
    on_cpus = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --config_file {file} train.py"
    """Of MULTI_CPU alone it starts one process (1.15, without MPI): --multi_gpu is what takes torchrun."""

    def limits(self, given: Configuration, target: Target) -> Iterator[Change]:
        """Its words: DDP, FSDP2 with and without resharding, hybrid sharding, tp and cp beside FSDP."""
        if given.pp > 1:
            yield Change({"pp": 1, "vp": 1, "schedule": "1f1b", "partition": None}, "accelerate launch has no stages")
        if not target.on_gpus and given.tp > 1:
            yield Change({"tp": 1, "sp": False}, "its ParallelismConfig is refused on CPUs (MULTI_CPU)")
        if not target.on_gpus and given.cp > 1:
            yield Change({"cp": 1}, "its ParallelismConfig is refused on CPUs (MULTI_CPU)")
        if not target.on_gpus and given.zero:
            yield Change({"zero": 0, "shard": None}, "on CPUs its processes run DDP, whatever fsdp_config says")
        if given.ep > 1:
            yield Change({"ep": 1}, "its parallelism_config has no experts")
        if given.sp:
            yield Change({"sp": False}, "its tensor parallelism is the model's tp_plan, which keeps norms whole")
        if given.zero == 1:
            yield Change({"zero": 2}, "FSDP cuts gradients with the optimizer's state")
        if given.zero in (0, 2) and given.data * given.cp > 1 and given.tp * given.cp > 1:
            yield Change({"zero": 3, "shard": None}, "DDP beside tp or cp is not supported, and FSDP2 reshards there")
        if given.recompute not in ("none", "full"):
            yield Change({"recompute": "full"}, "fsdp_activation_checkpointing is of whole layers")
        if target.dtype != "float32" and given.precision != "mixed":
            yield Change({"precision": "mixed"}, "mixed_precision keeps float32 parameters")

    def start_line(self, target: Target, file: str) -> str:
        """Several processes on CPUs want to be told twice."""
        return (self.start if target.on_gpus or target.devices == 1 else self.on_cpus).format(file=file)

    def in_script(self, given: Configuration) -> Mapping[str, str]:
        """Batches are the script's."""
        said = {
            "micro_batch": f"DataLoader(batch_size={given.micro_batch})",
            "batch": f"Accelerator(gradient_accumulation_steps={given.micro_batches})",
        }
        if given.recompute == "full" and not _cuts(given):
            said["recompute"] = "model.gradient_checkpointing_enable()"
        return said

    def write(self, given: Configuration, target: Target) -> str:
        """As ``accelerate config`` writes it."""
        cuts, several = _cuts(given), target.devices > 1
        kind = "FSDP" if cuts else ("MULTI_GPU" if target.on_gpus else "MULTI_CPU") if several else "NO"
        said: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": kind,
            "mixed_precision": WORDS[target.dtype],
            "num_machines": target.nodes,
            "num_processes": target.devices,
            "machine_rank": 0,
            "use_cpu": not target.on_gpus,
            "debug": False,
        }
        if cuts:
            said["fsdp_config"] = {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": given.zero != 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_activation_checkpointing": given.recompute == "full",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            }
        if given.tp * given.cp > 1 or given.shard is not None:
            sizes = {"shard": _shard(given), "copies": given.data // _shard(given), "tp": given.tp, "cp": given.cp}
            said["parallelism_config"] = {PREFIX + name: sizes[field] for name, field in SIZES.items()}
        head = beside_line(given, self.in_script(given))
        return head + dump_yaml(said)

    def read(self, text: str, reading: Reading) -> Found:
        """The same back, FSDP1's and DeepSpeed's ZeRO stages too."""
        del reading  # the file says how many devices it is for
        said = take_mapping(parse_yaml(text, self.name), "the file")
        check_names(said, KNOWN, "accelerate's file")
        if "distributed_type" not in said:
            raise UsageError("accelerate's file says no distributed_type", f"Allowed: {', '.join(KINDS)}")
        kind = take_word(said["distributed_type"], "distributed_type", KINDS)
        settings, unpriced = self._sizes(said), list[str]()
        if "num_processes" in said:
            devices = take_int(said["num_processes"], "num_processes")
            rest = settings.get("tp", 1) * settings.get("cp", 1)
            if devices % rest:
                raise UsageError(f"num_processes={devices} do not divide by tp x cp = {rest}")
            if settings.setdefault("dp", devices // rest) != devices // rest:
                raise UsageError(f"num_processes={devices} are not those of parallelism_config")
        if kind == "FSDP":
            settings |= _read_fsdp(take_mapping(said.get("fsdp_config") or {}, "fsdp_config"), unpriced)
            if take_bool(said.get("use_cpu", False), "use_cpu"):
                settings |= {"zero": 0}
                unpriced.append("fsdp_config (use_cpu: accelerate runs DDP)")
        if kind == "DEEPSPEED":
            settings |= _read_deepspeed(take_mapping(said.get("deepspeed_config") or {}, "deepspeed_config"), unpriced)
        if settings.get("dp") == 1 and settings.get("cp", 1) == 1:
            settings["zero"] = 0  # FSDP over one rank cuts nothing
        if settings.get("zero") != 3:
            settings.pop("shard", None)
        dtype = take_word(str(said.get("mixed_precision", "no")), "mixed_precision", DTYPES)
        settings |= {"precision": "mixed" if dtype else "as-emitted"}
        unread = [name for name in said if name in ("fp8_config", "dynamo_config", "megatron_lm_config") and said[name]]
        return Found(settings | read_beside(text), dtype, tuple(unpriced + unread))

    def _sizes(self, said: Mapping[str, Any]) -> Settings:
        sizes = take_mapping(said.get("parallelism_config") or {}, "parallelism_config")
        found = {}
        for name, value in sizes.items():
            field = SIZES.get(name.removeprefix(PREFIX))
            if field is not None:
                found[field] = take_int(value, name)
            elif not name.startswith(PREFIX):
                raise UsageError(
                    f"parallelism_config has no setting {name!r}", f"Allowed: {PREFIX}tp_size and the like"
                )
        settings: Settings = {name: found[name] for name in ("tp", "cp") if name in found}
        if {"copies", "shard"} & set(found):
            copies, shard = found.get("copies", 1), found.get("shard", 1)
            settings |= {"dp": copies * shard} | ({"shard": shard} if copies > 1 and shard > 1 else {})
        return settings


def _cuts(given: Configuration) -> bool:
    """Whether parameters are FSDP's."""
    return given.zero > 0 or given.tp * given.cp > 1


def _shard(given: Configuration) -> int:
    return given.shard or given.data


def _read_fsdp(said: Mapping[str, Any], unpriced: list[str]) -> Settings:
    settings: Settings = {"zero": 3}
    again = said.get("fsdp_reshard_after_forward", True)
    strategy = said.get("fsdp_sharding_strategy", again if isinstance(again, str) and again in STRATEGIES else None)
    if strategy is not None:
        if str(strategy) in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"):
            raise UsageError(
                "fsdp_sharding_strategy=HYBRID_SHARD does not say over how many ranks",
                "parallelism_config with dp_replicate_size and dp_shard_size",
                "Write fsdp_version: 2 and parallelism_config",
            )
        settings["zero"] = take_word(str(strategy), "fsdp_sharding_strategy", STRATEGIES)
    elif not take_bool(again, "fsdp_reshard_after_forward"):
        settings["zero"] = 2
    if take_bool(said.get("fsdp_activation_checkpointing", False), "fsdp_activation_checkpointing"):
        settings["recompute"] = "full"
    if take_bool(said.get("fsdp_offload_params", False), "fsdp_offload_params"):
        unpriced.append("fsdp_offload_params")
    return settings


def _read_deepspeed(said: Mapping[str, Any], unpriced: list[str]) -> Settings:
    if "deepspeed_config_file" in said:
        raise UsageError("the file leaves all to deepspeed_config_file", mend="Run pdv import on that file")
    unpriced += [
        name
        for name in ("offload_optimizer_device", "offload_param_device")
        if str(said.get(name, "none")).lower() != "none"
    ]
    return {"zero": take_int(said.get("zero_stage", 2), "zero_stage", least=0)}
