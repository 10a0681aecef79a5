"""torchtitan: its flags (`--parallelism.tensor_parallel_degree 8`) in a shell script, and TOML files of before 0.3.

Sources: torchtitan 0.3, ``config/configs.py`` (names and defaults), ``distributed/activation_checkpoint.py``,
``trainer.py``; 0.1 and 0.2 read the same sections from TOML files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ir.errors import UsageError, did_you_mean
from pdv.engines.engine import Change, Engine, Found, Reading, Settings, Target, names, take_bool, take_int, take_word
from pdv.engines.flags import read_flags, script
from pdv.engines.parsing import parse_toml
from pdv.manual.configuration import Configuration
from pdv.problem.recomputation import HOSTED

P, T, C = "parallelism.", "training.", "compile."
COPIES, SHARD = f"{P}data_parallel_replicate_degree", f"{P}data_parallel_shard_degree"
DEGREES = {
    f"{P}tensor_parallel_degree": "tp",
    f"{P}pipeline_parallel_degree": "pp",
    f"{P}context_parallel_degree": "cp",
    f"{P}expert_parallel_degree": "ep",
}
RESHARD, SEQUENCE = f"{P}fsdp_reshard_after_forward", f"{P}enable_sequence_parallel"
FIRST, LAST = f"{P}pipeline_parallel_first_stage_less_layers", f"{P}pipeline_parallel_last_stage_less_layers"
SCHEDULE, EACH, MICRO = (f"{P}pipeline_parallel_{name}" for name in ("schedule", "layers_per_stage", "microbatch_size"))
LOCAL, BATCH, DTYPE = f"{T}local_batch_size", f"{T}global_batch_size", f"{T}dtype"
PARAM, COMPILE, ASYNC = f"{T}mixed_precision_param", f"{C}enable", f"{C}enable_async_tensor_parallel"
SCHEDULES: Mapping[str, tuple[str, int]] = {  # ours, and chunks on each stage (0: as many as there are)
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("interleaved", 2),
}
AGAIN = {"none": "none", "full": "full", "selective": "operators"}
READ = frozenset(
    {*DEGREES, COPIES, SHARD, RESHARD, SEQUENCE, FIRST, LAST, SCHEDULE, EACH, MICRO, LOCAL, BATCH, DTYPE, PARAM}
    | {COMPILE, ASYNC, f"{P}enable_async_tensor_parallel", f"{T}batch_size", "activation_checkpoint.mode"}
    | {f"{T}mixed_precision_reduce", f"{C}components"}
)
HARMLESS = frozenset(
    f"{P}{name}" for name in names("spmd_backend context_parallel_load_balancer context_parallel_rotate_method")
) | frozenset(f"{T}{name}" for name in names("seq_len max_norm steps gc_freq gc_debug dataset deterministic seed")) | {
    f"{T}disable_cuda_graphs", f"{C}backend", f"{C}model", f"{C}loss", "activation_checkpoint.preserve_rng_state",
    "activation_checkpoint.selective_ac_option", f"{T}compile",
}  # fmt: skip
UNPRICED = frozenset(
    {f"{T}enable_cpu_offload", f"{P}enable_fsdp_symm_mem", f"{P}module_fqns_per_model_part"}
    | {f"{P}pipeline_parallel_schedule_csv", f"{P}pipeline_parallel_split_points"}
    | {f"{P}context_parallel_ptrr_mask_key", f"{P}expert_tensor_parallel_degree", f"{P}enable_compiled_autograd"}
    | {f"{P}disable_loss_parallel", "activation_checkpoint.early_stop", f"{P}enable_loss_parallel"}
)
SECTIONS = (P, T, C, "activation_checkpoint.")


class Torchtitan(Engine):
    """DDP, FSDP2, hybrid sharding, tensor, sequence, context and expert parallelism, pipelines, recomputation."""

    name = "torchtitan"
    file = "torchtitan.sh"
    start = "sh {file} --module llama3 --config llama3_8b"

    def limits(self, given: Configuration, target: Target) -> Iterator[Change]:
        """ZeRO as FSDP2 has it; schedules by torch's names; equal stages but for the ends.

        Raises:
            UsageError: if compute is in a type that it does not have.
        """
        if target.dtype == "float16":
            raise UsageError("torchtitan does not train in float16", "bfloat16, float32", "Plan with --dtype bfloat16")
        if given.schedule not in {ours for ours, _ in SCHEDULES.values()}:
            yield Change(
                {"schedule": "1f1b", "vp": 1, "partition": None}, "pdv prices no such schedule of torchtitan's"
            )
        if given.vp > 2 and given.partition is None and (not target.layers or target.layers % (given.pp * given.vp)):
            yield Change({"vp": 2}, "more chunks are said by layers of each, which are not equally many here")
        if given.zero == 1:
            yield Change({"zero": 2}, "FSDP2 cuts gradients with the optimizer's state")
        if given.cp > 1 and given.zero != 3:
            yield Change({"zero": 3}, "context-parallel ranks cut weights")
        if given.partition is not None and _less(given) is None:
            yield Change({"partition": None}, "all stages but the first and the last have equally many layers")
        if given.sp and given.tp == 1:
            yield Change({"sp": False}, "sequence parallelism is along its tensor-parallel ranks")
        if given.recompute in ("light", "selective", "elementwise", "alternate"):
            yield Change({"recompute": "operators"}, "it is written with selective checkpointing by operator")
        if given.recompute in ("offload", *HOSTED):
            yield Change({"recompute": "full"}, "it offloads no activations")
        if target.dtype == "bfloat16" and given.precision not in ("mixed", "as-emitted"):
            yield Change({"precision": "mixed"}, "it sums gradients in float32")

    def write(self, given: Configuration, target: Target) -> str:
        """A script for all nodes; module and model are left to its arguments."""
        said: dict[str, object] = {flag: getattr(given, name) for flag, name in DEGREES.items()}
        shard = (given.shard or given.data) if given.zero else 1
        said |= {COPIES: given.data // shard, SHARD: shard}
        if given.zero:
            said[RESHARD] = "always" if given.zero == 3 else "never"
        if given.pp > 1:
            said[SCHEDULE] = next(word for word, (ours, _) in SCHEDULES.items() if ours == given.schedule)
            first, last = _less(given) or (0, 0)
            said |= {FIRST: first, LAST: last, MICRO: given.micro_batch}
            if given.vp > 2 or given.partition is not None:
                said[EACH] = -(-(target.layers + first + last) // (given.pp * given.vp))
        said[LOCAL] = given.micro_batch * (given.micro_batches if given.pp > 1 else 1)
        said[BATCH] = given.batch
        full = target.dtype == "bfloat16" and given.precision == "as-emitted"
        said |= {DTYPE: "bfloat16" if full else "float32", PARAM: target.dtype}
        lines = [f"--{flag} {value}" for flag, value in said.items()]
        if given.tp > 1:
            lines.append(f"--{SEQUENCE}" if given.sp else f"--{P}no-enable_sequence_parallel")
        lines += [f"--{T}disable_cuda_graphs"] if given.pp > 1 else []  # it refuses them beside stages
        again = next(word for word, ours in AGAIN.items() if ours == given.recompute)
        head = f'"$@" activation_checkpoint:{again}'
        return script(target, "-m torchtitan.train", lines).replace('"$@"', head)

    def read(self, text: str, reading: Reading) -> Found:
        """Flags of a script, or a TOML file."""
        said, again = _read_text(text)
        if not any(name.startswith(P) for name in said):
            raise UsageError("this is no configuration of torchtitan: nothing of [parallelism] stands in it")
        for name in said:
            if name.startswith(SECTIONS) and name not in READ | HARMLESS | UNPRICED:
                raise UsageError(
                    f"torchtitan has no setting {name}", "", did_you_mean(name, READ | HARMLESS | UNPRICED)
                )
        settings: Settings = {name: take_int(said[flag], flag) for flag, name in DEGREES.items() if flag in said}
        dtype, unpriced = said.get(DTYPE, "float32"), [name for name in said if name in UNPRICED and said[name]]
        settings |= _read_data(said, settings, reading)
        settings |= _read_stages(said, settings.get("pp", 1), reading.layers)
        settings |= _read_batch(said, settings, unpriced)
        if settings.get("tp", 1) > 1:
            settings["sp"] = take_bool(said.get(SEQUENCE, True), SEQUENCE)
        mode = again if again is not None else said.get("activation_checkpoint.mode", "selective")
        settings["recompute"] = take_word(mode, "activation_checkpoint", AGAIN)
        if take_bool(said.get(COMPILE, said.get(f"{T}compile", False)), COMPILE):
            settings |= {"fused": True, "loss": "fused"}
        if take_bool(said.get(ASYNC, said.get(f"{P}enable_async_tensor_parallel", False)), ASYNC):
            settings["pieces"] = True
        param = said.get(PARAM, "bfloat16")
        for value, where in ((dtype, DTYPE), (param, PARAM)):
            take_word(value, where, {"bfloat16": 1, "float32": 1})
        mixes = not _is_toml(text) or _mixes(Configuration.model_validate(settings | {"dp": settings["dp"]}))
        masters = dtype == "float32" and param == "bfloat16" and mixes
        settings["precision"] = "mixed" if masters else "as-emitted"
        unread = tuple(name for name in said if "." in name and name not in READ | UNPRICED)
        return Found(settings, "bfloat16" if masters else str(dtype), tuple(unpriced), unread)


def _mixes(given: Configuration) -> bool:
    """Where mixed_precision_param is in force before 0.3, which has it everywhere: FSDP2, or data parallelism alone."""
    return (given.zero > 0 and given.data * given.cp > 1) or given.tp * given.pp * given.cp == 1


def _less(given: Configuration) -> tuple[int, int] | None:
    """Layers that the first and the last chunk have less than the others, where these are equal."""
    parts = given.partition
    if not isinstance(parts, tuple):
        return None if parts else (0, 0)
    if len(parts) < 3 or len(set(parts[1:-1])) > 1:
        return None
    first, last = parts[1] - parts[0], parts[1] - parts[-1]
    return (first, last) if first >= 0 and last >= 0 else None


def _is_toml(text: str) -> bool:
    """Whether it is a TOML file, of before 0.3."""
    return "--parallelism." not in text


def _read_text(text: str) -> tuple[dict[str, Any], str | None]:
    """Settings by dotted name, and the kind of recomputation that a script names."""
    if _is_toml(text):
        tables = parse_toml(text, "torchtitan")
        flat = {f"{table}.{name}": value for table, of in tables.items() if isinstance(of, dict)
                for name, value in of.items()}  # fmt: skip
        return flat, None
    flags, others = read_flags(text, "torchtitan")
    said: dict[str, Any] = {}
    for name, value in flags.items():
        section, dot, last = name.rpartition(".")
        if last.startswith("no_"):
            said[f"{section}{dot}{last[3:]}"] = False
        else:
            said[name] = True if value is None or value.startswith("activation_checkpoint:") else value
    words = [*others, *(value for value in flags.values() if value)]
    kinds = [word.partition(":")[2] for word in words if word.startswith("activation_checkpoint:")]
    return said, kinds[-1] if kinds else None


def _read_data(said: Mapping[str, Any], settings: Settings, reading: Reading) -> Settings:
    others = settings.get("tp", 1) * settings.get("pp", 1) * settings.get("cp", 1)
    if reading.devices % others:
        raise UsageError(f"tp x pp x cp = {others} devices do not divide {reading.devices}")
    ranks = reading.devices // others
    copies, shard = take_int(said.get(COPIES, 1), COPIES), str(said.get(SHARD, -1))
    if shard != "-1":
        cut = take_int(said[SHARD], SHARD)
    else:
        cut = ranks // copies
        if ranks % copies:
            raise UsageError(f"{COPIES}={copies} does not divide {ranks} data-parallel ranks")
    if copies * cut != ranks:
        raise UsageError(f"{COPIES}={copies} x {SHARD}={cut} are not the {ranks} data-parallel ranks there are")
    if cut == 1 and settings.get("cp", 1) == 1:
        return {"dp": ranks, "zero": 0}
    policy = take_word(said.get(RESHARD, "default"), RESHARD, {"default": None, "always": 3, "never": 2})
    zero = policy or (2 if settings.get("pp", 1) > 1 else 3)
    hybrid = {"shard": cut} if zero == 3 and copies > 1 and cut > 1 else {}
    return {"dp": ranks, "zero": zero, **hybrid}


def _read_stages(said: Mapping[str, Any], pp: int, layers: int) -> Settings:
    if pp == 1:
        return {}
    ours, vp = take_word(said.get(SCHEDULE, "1F1B"), SCHEDULE, SCHEDULES)
    first, last = (take_int(said.get(name, 1), name, least=0) for name in (FIRST, LAST))
    found: Settings = {"schedule": ours, "vp": vp}
    if EACH in said and layers:
        chunks = -(-(layers + first + last) // take_int(said[EACH], EACH))
        if chunks % pp:
            raise UsageError(f"{EACH} makes {chunks} chunks of {layers} layers, which do not divide by {pp} stages")
        found["vp"] = chunks // pp
    if first != last or first > 0:
        found["partition"] = _partition(layers, pp * found["vp"], first, last)
    return found


def _partition(layers: int, chunks: int, first: int, last: int) -> tuple[int, ...]:
    """As torchtitan's ``generate_llm_fqn_per_model_part`` counts: ends have less, what is over goes to the front."""
    if not layers:
        raise UsageError(f"{FIRST} and {LAST}: of how many layers is not said", mend="Give the model with --arch")
    each, over = divmod(layers + first + last, chunks)
    sizes = [each + (place < over) for place in range(chunks)]
    sizes[0] -= first
    sizes[-1] -= last
    if min(sizes) < 0:
        raise UsageError(f"{layers} layers on {chunks} chunks, {first} less on the first and {last} on the last")
    return tuple(sizes)


def _read_batch(said: Mapping[str, Any], settings: Settings, unpriced: list[str]) -> Settings:
    local_name = LOCAL if LOCAL in said else f"{T}batch_size"
    if local_name not in said:
        return {}
    local, ranks = take_int(said[local_name], local_name), settings["dp"]
    whole = str(said.get(BATCH, -1))
    batch = local * ranks if whole == "-1" else take_int(said[BATCH], BATCH)
    if batch % (local * ranks):
        raise UsageError(f"{BATCH}={batch} does not divide by {local_name}={local} x {ranks} data-parallel ranks")
    if settings.get("pp", 1) == 1:
        return {"batch": batch, "micro_batch": local}
    micro = take_int(said.get(MICRO, 1), MICRO)
    if batch != local * ranks:
        unpriced.append(f"{BATCH} (pipelines one after the other are simulated as one)")
    return {"batch": batch, "micro_batch": micro}
