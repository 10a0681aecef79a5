"""Megatron-LM: the flags of `pretrain_gpt.py`, in a shell script.

Sources: Megatron-LM's ``megatron/training/arguments.py``; Megatron-Core 0.16, ``ModelParallelConfig``,
``DistributedDataParallelConfig`` and ``TransformerConfig``, whose fields the flags are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ir.errors import UsageError, did_you_mean
from pdv.engines.engine import Change, Engine, Found, Reading, Settings, Target, names, take_word
from pdv.engines.flags import Flags, read_flags, read_world, script, take_flag
from pdv.manual.configuration import Configuration
from pdv.problem.recomputation import HOSTED, WHOLE

DEGREES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "batch",
}
SWITCHES = {
    "sequence_parallel": "sp",
    "overlap_param_gather": "weights",
    "tp_comm_overlap": "pieces",
}
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
FSDP, STRATEGY = "use_megatron_fsdp", "data_parallel_sharding_strategy"
STAGES, CHUNK_LAYERS = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
GRANULARITY, EACH = "recompute_granularity", "recompute_num_layers"
READ = frozenset(
    {*DEGREES, *SWITCHES, FSDP, STRATEGY, STAGES, CHUNK_LAYERS, FIRST, LAST, GRANULARITY, EACH}
    | names("bf16 fp16 use_distributed_optimizer overlap_grad_reduce recompute_method recompute_activations")
    | names("fp8_format fp8_hybrid num_layers nproc_per_node nnodes cross_entropy_loss_fusion use_custom_fsdp")
)
UNPRICED = (
    "optimizer_cpu_offload", "cpu_offloading", "use_torch_fsdp2", "expert_tensor_parallel_size", "recompute_modules",
    "pipeline_model_parallel_layout", "moe_shared_expert_overlap", "delay_wgrad_compute", "fp8_param_gather",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "context_parallel_ulysses_degree",
    "hierarchical_context_parallel_sizes", "num_distributed_optimizer_instances", "use_precision_aware_optimizer",
    "defer_embedding_wgrad_compute", "decoder_num_layers", "encoder_num_layers", "encoder_tensor_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_split_rank", "rampup_batch_size",
)  # fmt: skip


class Megatron(Engine):
    """Every degree, interleaving, its distributed optimizer, Megatron-FSDP without stages, recomputation."""

    name = "megatron"
    file = "megatron.sh"
    start = "sh {file} --num-layers … --hidden-size … --data-path …"

    def limits(self, given: Configuration, target: Target) -> Iterator[Change]:
        """Its schedules are 1F1B and its interleaving; weights are cut by Megatron-FSDP, without stages."""
        if given.schedule not in ("1f1b", "interleaved"):
            nearest = "interleaved" if given.vp > 1 and given.micro_batches % given.pp == 0 else "1f1b"
            update = {"schedule": nearest} | ({} if nearest == "interleaved" else {"vp": 1, "partition": None})
            yield Change(update, "its schedules are 1F1B and interleaved 1F1B")
        if given.zero > 1 and given.pp > 1:
            yield Change({"zero": 1, "shard": None}, "beside stages it cuts the optimizer's state alone")
        if given.shard is not None:
            yield Change({"shard": None}, "Megatron-FSDP cuts over all data-parallel ranks")
        if given.sp and given.tp == 1:
            yield Change({"sp": False}, "sequence parallelism is along its tensor-parallel ranks")
        if given.recompute in ("light", "operators", "elementwise"):
            yield Change({"recompute": "selective"}, "its selective recomputation is of attention's inside")
        if given.recompute == "alternate":
            yield Change({"recompute": "full"}, "it is written with all layers of a stage recomputed")
        if given.recompute in ("offload", *HOSTED):
            again = "full" if given.recompute in WHOLE else "none"
            yield Change({"recompute": again}, "its offloading is of Transformer Engine's layers")
        if given.partition is not None and not _ends(given):
            yield Change({"partition": None}, "all stages but the first and the last have equally many layers")
        if target.dtype != "float32" and given.precision != "mixed":
            yield Change(
                {"precision": "mixed"}, "its optimizer keeps float32 parameters, and sums gradients in float32"
            )

    def write(self, given: Configuration, target: Target) -> str:
        """A script for all nodes; what the model and the data are is left to its arguments."""
        lines = [f"--{_dashes(flag)} {getattr(given, name)}" for flag, name in DEGREES.items()]
        lines += [f"--{_dashes(flag)}" for flag, name in SWITCHES.items() if getattr(given, name)]
        if given.vp > 1:
            lines.append(f"--{_dashes(STAGES)} {given.vp}")
        if given.partition is not None:
            ends = _ends(given)
            assert ends is not None, "limits leave no other"
            first, last = ends
            lines += [f"--{_dashes(FIRST)} {first}", f"--{_dashes(LAST)} {last}"]
        if given.zero == 1:
            lines.append("--use-distributed-optimizer")
        if given.zero > 1:
            kind = next(word for word, zero in SHARDED.items() if zero == given.zero)
            lines += ["--use-distributed-optimizer", f"--{_dashes(FSDP)}", f"--{_dashes(STRATEGY)} {kind}"]
        lines += ["--overlap-grad-reduce"] if given.gradients else []
        if given.recompute == "full":
            lines.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        elif given.recompute == "selective":
            lines.append("--recompute-granularity selective")
        lines += [] if target.dtype == "float32" else ["--bf16" if target.dtype == "bfloat16" else "--fp16"]
        return script(target, "pretrain_gpt.py", lines)

    def read(self, text: str, reading: Reading) -> Found:
        """Flags of any script that starts it, the model's sizes among them."""
        flags, _ = read_flags(text, self.name)
        _check_flags(flags)
        settings: Settings = {name: take_flag(flags, flag) for flag, name in DEGREES.items() if flag in flags}
        settings |= {name: True for flag, name in SWITCHES.items() if flag in flags}
        settings["gradients"] = "overlap_grad_reduce" in flags
        settings["zero"] = _read_zero(flags)
        world = read_world(flags)
        if world is not None:
            others = settings.get("tp", 1) * settings.get("pp", 1) * settings.get("cp", 1)
            if world % others:
                raise UsageError(f"tp x pp x cp = {others} devices do not divide torchrun's {world}")
            settings["dp"] = world // others
        layers = take_flag(flags, "num_layers") if "num_layers" in flags else reading.layers
        settings |= _read_stages(flags, settings.get("pp", 1), layers)
        unpriced = [f"--{_dashes(name)}" for name in UNPRICED if name in flags]
        settings |= _read_recompute(flags, unpriced)
        dtype = "bfloat16" if "bf16" in flags else "float16" if "fp16" in flags else "float32"
        settings["precision"] = "as-emitted" if dtype == "float32" else "mixed"
        if {"fp8_format", "fp8_hybrid"} & set(flags):
            settings["products"] = "fp8"
        if "cross_entropy_loss_fusion" in flags:
            settings["loss"] = "fused"
        unread = tuple(f"--{_dashes(name)}" for name in flags if name not in READ and name not in UNPRICED)
        return Found(settings, dtype, tuple(unpriced), unread)


def _dashes(flag: str) -> str:
    return flag.replace("_", "-")


def _check_flags(flags: Flags) -> None:
    """That it is a script of Megatron's, and none of the flags that are read is misspelt.

    Raises:
        UsageError: naming the flag that nobody reads.
    """
    if not set(DEGREES) & set(flags):
        raise UsageError(
            "this is no script of megatron: it has none of its flags", f"Wanted: --{_dashes(next(iter(DEGREES)))}"
        )
    for name in flags:
        near = "parallel_size" in name and name not in READ and name not in UNPRICED
        if near:
            known = [f"--{_dashes(one)}" for one in sorted(READ)]
            raise UsageError(f"megatron has no flag --{_dashes(name)}", "", did_you_mean(f"--{_dashes(name)}", known))


def _ends(given: Configuration) -> tuple[int, int] | None:
    """Layers of the first and the last stage, where all between them have equally many."""
    parts = given.partition
    if not isinstance(parts, tuple) or given.vp > 1 or len(parts) < 2 or len(set(parts[1:-1])) > 1:
        return None
    return parts[0], parts[-1]


def _read_zero(flags: Flags) -> int:
    if FSDP in flags or "use_custom_fsdp" in flags:
        return int(take_word(flags.get(STRATEGY) or "no_shard", f"--{_dashes(STRATEGY)}", SHARDED))
    return int("use_distributed_optimizer" in flags)


def _read_stages(flags: Flags, pp: int, layers: int) -> Settings:
    """Chunks of each stage, and stages of unequal length."""
    found: Settings = {}
    if STAGES in flags:
        found["vp"] = take_flag(flags, STAGES)
    elif CHUNK_LAYERS in flags:
        each = take_flag(flags, CHUNK_LAYERS)
        if not layers:
            raise UsageError(f"--{_dashes(CHUNK_LAYERS)}: of how many layers is not said", mend="Give --num-layers")
        if layers % (pp * each):
            raise UsageError(f"--{_dashes(CHUNK_LAYERS)} {each}: {layers} layers on {pp} stages do not divide so")
        found["vp"] = layers // (pp * each)
    if found.get("vp", 1) > 1:
        found["schedule"] = "interleaved"
    if {FIRST, LAST} & set(flags):
        found["partition"] = _read_ends(flags, pp, layers)
    return found


def _read_ends(flags: Flags, pp: int, layers: int) -> tuple[int, ...]:
    given = {name: take_flag(flags, name) for name in (FIRST, LAST) if name in flags}
    between = pp - len(given)
    if pp < 2 or not layers:
        raise UsageError(f"--{_dashes(next(iter(given)))}: of stages and layers that are not said")
    rest = layers - sum(given.values())
    if rest < 0 or (between and rest % between) or (not between and rest):
        raise UsageError(f"{layers} layers on {pp} stages, {', '.join(map(str, given.values()))} at the ends")
    each = rest // between if between else 0
    return (given.get(FIRST, each), *[each] * (pp - 2), given.get(LAST, each))


def _read_recompute(flags: Flags, unpriced: list[str]) -> Mapping[str, str]:
    if "recompute_activations" in flags:
        return {"recompute": "selective"}
    if GRANULARITY not in flags:
        return {}
    kind = take_word(flags[GRANULARITY], f"--{_dashes(GRANULARITY)}", {"full": "full", "selective": "selective"})
    if kind == "full" and (flags.get("recompute_method") == "block" or flags.get(EACH, "1") != "1"):
        unpriced.append(f"--{_dashes(EACH)} (every layer is recomputed on its own)")
    return {"recompute": kind}
