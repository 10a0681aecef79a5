"""Published training runs, one a row of a CSV file, as what `pdv simulate --manual` takes.

Decides how a run's stated facts are read: units, bandwidths as people write them, models by name or by their sizes,
several kinds of GPU in one cell. What is not stated gets one default for all runs, said here; nothing is fitted. A row
that cannot be read becomes a `Refused` with the reason, never a guess. Entry point: `read_runs`.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published.cluster import cluster_of

Row = Mapping[str, str]
MEASURED = ("measured(value)", "measured")
# Heads of at least this many dims, where the number of heads is not stated.
HEAD_DIM = 128
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)


class Unreadable(ValueError):
    """A row does not say what a simulation needs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``arch``, ``manual`` and ``cluster`` are what the command line takes.

    ``micro_batch`` and ``virtual`` are None where the row leaves them open; ``group`` is equal for plans of the same
    model, devices and batch.
    """

    number: int
    set: str
    model: str
    arch: str
    cluster: dict[str, Any]  # Any: a cluster file's content
    manual: dict[str, Any]
    batch: int
    devices: int
    measured_s: float
    memory_bytes: float | None
    group: tuple[str, ...]
    micro_batch: int | None
    virtual: int | None
    single: bool = False  # float32, said so
    recompute: tuple[str, ...] = ()  # what users choose among where the row does not say
    reserved: bool = False  # stated memory is what the allocator reserved, not what the device shows

    @property
    def stated(self) -> str:
        """Equal for runs that state the same, whatever was measured of them."""
        return repr(replace(self, number=0, set="", model="", group=(), measured_s=0.0, memory_bytes=None))


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that could not be read, and why."""

    number: int
    set: str
    why: str

    def __post_init__(self) -> None:
        assert self.why.strip(), f"row {self.number} is refused without a reason"


@dataclass(frozen=True, slots=True)
class Framework:
    """What a training framework is known to do, from its documentation."""

    flash: bool
    fused: bool
    dropout: bool
    precision: str
    gathers: int = 0  # layers that weights are gathered ahead
    gradients: bool = False  # summed beside backward
    weights: bool = False  # of ZeRO 1, gathered beside forward
    pieces: bool = False  # activations beside the products that read or make them
    sequence: bool = False  # tensor parallelism is always sequence parallelism as well
    loss: str = "in-place"
    cast_weights: bool = False  # gathered as they are multiplied
    recompute_open: bool = False  # what is recomputed is the user's choice, which tables leave out
    light: bool = False  # on GPUs since Hopper
    as_stages: bool = False  # a step has as many micro-batches as a pipeline has stages, where nothing is said
    reserved: bool = False  # memory is stated as torch.cuda.max_memory_reserved
    slices: bool = False  # of what tensor-parallel ranks hold alike, sent between stages
    synchronous: bool = False  # CUDA_LAUNCH_BLOCKING=1


# By a word of `source` or `notes`. Megatron-LM and its DeepSpeed fork until 2022: fused softmax, bias-gelu and
# bias-dropout-add, scores written, slices sent between stages (Narayanan et al., SC'21, sections 4.1 and 4.2);
# DeepSpeed's gradients stay in half precision.
# llm-foundry: FSDP with FlashAttention in eager mode. torchtitan: FSDP, compiled, SDPA; of its pipelines
# "n_microbatches=parallel_dims.pp" (parallelisms/pipelining_utils.py). Others as eager PyTorch with
# autocast.
TITAN = Framework(
    flash=True, fused=True, dropout=False, precision="mixed", gathers=1, gradients=True, sequence=True, loss="float32",
    reserved=True, light=True, cast_weights=True, as_stages=True,
)  # fmt: skip
# Megatron Core: FlashAttention, sequence parallelism, and all of its overlaps (README, "Training Speed and
# Scalability": --tp-comm-overlap, --overlap-grad-reduce, --overlap-param-gather); gradients are summed in bfloat16.
CORE = Framework(
    flash=True, fused=True, dropout=False, precision="mixed-half-gradients", gathers=1, gradients=True, weights=True,
    pieces=True, sequence=True, loss="fused", cast_weights=True, recompute_open=True, light=True,
)  # fmt: skip
MEGATRON = Framework(flash=False, fused=True, dropout=True, precision="mixed", slices=True)
DEEPSPEED = replace(MEGATRON, precision="mixed-half-gradients")
FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    ("torchtitan", TITAN),
    ("megatron-bridge", CORE),
    ("overlap flags in readme", CORE),
    ("foundry", Framework(flash=True, fused=False, dropout=False, precision="mixed", gathers=1, gradients=True)),
    ("deepspeed", DEEPSPEED),
    # The chronicle says so itself: from that section on, DeepSpeed's BF16_Optimizer, which sums gradients in float32
    # beside those of two bytes; before it, gradients were summed in fp16. And CUDA_LAUNCH_BLOCKING=1 throughout, for
    # 320 GPUs always hung without it ("dealing with JZ hanging on the large model").
    ("rebalancing layers", replace(DEEPSPEED, precision="mixed-two-gradients", synchronous=True)),
    ("bigscience", replace(DEEPSPEED, synchronous=True)),
    ("megatron", MEGATRON),
    ("2205.05198", MEGATRON),
)
FSDP = Framework(flash=True, fused=False, dropout=False, precision="mixed", gathers=1, gradients=True)
EAGER = Framework(flash=False, fused=False, dropout=True, precision="mixed-half-gradients")
# GPUs that came after FlashAttention: frameworks that train on them use it.
LATER = ("h100", "h200", "h800", "gh200", "gh96", "b200", "gb200", "b300", "gb300", "mi300", "l40s")


def read_runs(path: Path) -> tuple[list[Run], list[Refused]]:
    """Every row of a file, read or refused."""
    runs: list[Run] = []
    refused: list[Refused] = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                runs.append(run_of(number, row))
            except (Unreadable, ValueError, ZeroDivisionError) as error:
                refused.append(Refused(number, row.get("set", ""), str(error)))
    return runs, refused


def run_of(number: int, row: Row) -> Run:
    """One row.

    Raises:
        Unreadable: if it lacks a fact that has no default, or names a device that has no record.
    """
    framework = framework_of(row)
    degrees = {name: _int(row, name, 1) for name in ("tp", "pp", "cp", "ep")}
    devices = _int(row, "num_gpus")
    cluster = cluster_of(row, devices)
    counted = sum(node.get("count", 1) * node["devices"] for node in cluster["nodes"])
    batch, data = _int(row, "global_batch"), counted // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    data = _int(row, "dp", data)
    heads = _int(row, "heads", 0) or default_heads(_int(row, "hidden"), degrees["tp"])
    arch = arch_of(row, heads)
    micro = _int(row, "micro_batch", 0) or None
    if framework.as_stages and degrees["pp"] > 1:  # else its whole local batch
        micro = micro or max(1, batch // (data * degrees["pp"]))
    partition = partition_of(row.get("notes", ""), _int(row, "layers"), degrees["pp"])
    manual = _manual(row, framework, degrees | {"dp": data}, micro, partition)
    plan_free = ("set", "model", "layers", "hidden", "heads", "seq", "gpu", "num_gpus", "global_batch")
    memory = _float(row, "mem_gb")
    virtual = _int(row, "vp", 0) or (None if "interleaved" in row.get("schedule", "") else 1)
    return Run(
        number, row.get("set", ""), row.get("model", ""), arch, cluster, manual, batch, devices,
        measured_s(row, batch, devices), None if memory is None else memory * 2**30,
        tuple(row.get(name, "") for name in plan_free), micro, virtual, in_float32(row),
        again_of(cluster) if framework.recompute_open and not row.get("recompute") else (), framework.reserved,
    )  # fmt: skip


def framework_of(row: Row) -> Framework:
    """By the source's name; else by ZeRO-3, which is FSDP's, and by the age of the GPU."""
    text = f"{row.get('source', '')} {row.get('notes', '')} {row.get('zero', '')}".lower()
    for word, framework in FRAMEWORKS:
        if word in text:
            notes = re.sub("[^a-z0-9]", "", row.get("notes", "").lower())
            return replace(
                framework,
                flash=framework.flash or is_later(row),
                pieces=framework.pieces or "asynctp" in notes,
                loss="fused" if framework is TITAN and "2025" in text else framework.loss,  # compiled since April 2025
            )
    return FSDP if _int(row, "zero", 0) == 3 else replace(EAGER, flash=is_later(row))


def again_of(cluster: Mapping[str, Any]) -> tuple[str, ...]:
    """What users of Megatron Core choose among, cheapest first; offloading where the host is a link of NVLink away."""
    coherent = all(str(node["device"]).startswith(("gb200", "gb300", "gh200")) for node in cluster["nodes"])
    return ("none", "elementwise", *(["offload"] if coherent else []), "full")


def products_of(row: Row) -> str:
    """The format of products in layers, as settings call it; fp8 without more is scaled by tensor."""
    text = row.get("precision", "").lower()
    words = (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("rowwise", "fp8-rowwise"), ("fp8", "fp8"))
    return next((name for word, name in words if word in text), "own")


def is_later(row: Row) -> bool:
    """Whether a row's GPUs came after FlashAttention."""
    return any(name in re.sub(r"[^a-z0-9]", "", row.get("gpu", "").lower()) for name in LATER)


def in_float32(row: Row) -> bool:
    """Whether a row says float32 and nothing narrower."""
    text = row.get("precision", "").lower()
    return "32" in text and not any(word in text for word in ("16", "8", "amp", "mixed"))


def _manual(
    row: Row, framework: Framework, degrees: Mapping[str, int], micro: int | None, partition: tuple[int, ...] | None
) -> dict[str, Any]:
    recompute = row.get("recompute", "").lower()
    interleaved = "interleaved" in row.get("schedule", "").lower()
    manual: dict[str, Any] = {name: size for name, size in degrees.items() if size > 1}
    manual["zero"] = _int(row, "zero", int("distributed optimizer" in row.get("zero", "")))
    manual["recompute"] = next((kind for kind in ("full", "selective") if kind in recompute), "none")
    # torchtitan's default of selective checkpointing is by operator; by layer it is of every second one (its models'
    # `selective_ac_option = '2'`)
    if "selective-op" in recompute or (recompute == "selective" and framework.reserved):
        manual["recompute"] = "operators"
    if "selective-layer" in recompute:
        manual["recompute"] = "alternate"
    if ("sequence" in recompute or framework.sequence) and degrees["tp"] > 1:
        manual["sp"] = True
    manual["schedule"] = "interleaved" if interleaved and degrees["pp"] > 1 else "1f1b"
    manual["micro_batch"] = micro or 1
    manual |= {"flash": framework.flash, "fused": framework.fused, "dropout": framework.dropout}
    manual |= {"precision": framework.precision, "gathers": framework.gathers, "gradients": framework.gradients}
    manual |= {"products": products_of(row), "loss": framework.loss, "weights": framework.weights}
    manual["light"] = framework.light and is_later(row)
    manual |= {"pieces": framework.pieces, "cast_weights": framework.cast_weights}
    manual |= {"slices": framework.slices, "synchronous": framework.synchronous}
    if in_float32(row):
        manual["precision"] = "as-emitted"
    if partition is not None:
        manual["partition"] = partition
    return manual


# ---- Models ----


def default_heads(hidden: int, tp: int) -> int:
    """The most heads of at least ``HEAD_DIM`` dims that divide the hidden size and that ``tp`` divides."""
    fitting = [n for n in range(1, hidden // HEAD_DIM + 1) if hidden % n == 0 and n % tp == 0]
    return max(fitting, default=max(1, hidden // HEAD_DIM))


def arch_of(row: Row, heads: int) -> str:
    """The model in the words of ``--arch``: Llama and Mixtral kinds by name, any other as GPT."""
    name = row.get("model", "").lower()
    layers, hidden, seq, vocab = (_int(row, field) for field in ("layers", "hidden", "seq", "vocab"))
    sizes = f"layers={layers},hidden={hidden},heads={heads},seq={seq},vocab={vocab}"
    if "mixtral" in name or re.search(r"\d+x\d", name):
        experts = int(match[1]) if (match := re.search(r"(\d+)x\d", name)) else 8
        ffn = _int(row, "ffn", 0) or {4096: 14336, 6144: 16384}.get(hidden, int(3.5 * hidden))
        return f"mixtral:{sizes},kv_heads={min(heads, 8)},ffn={ffn},experts={experts},topk=2"
    if any(word in name for word in ("llama", "mistral", "qwen", "opt-llama")):
        grouped = "3" in name.split("-", 1)[-1][:3] or "70b" in name or "405b" in name or "mistral" in name
        kv_heads = 8 if grouped and heads % 8 == 0 else heads
        return f"llama:{sizes},kv_heads={kv_heads},ffn={_gated_ffn(row, hidden, layers, vocab, heads, kv_heads)}"
    return f"gpt:{sizes}"


def _gated_ffn(row: Row, hidden: int, layers: int, vocab: int, heads: int, kv_heads: int) -> int:
    """What the stated number of parameters leaves for three products a layer; else Llama's rule, 8/3 of hidden."""
    rule = -(-8 * hidden // 3 // 256) * 256
    total = parameters(row.get("params", ""))
    if total is None:
        return rule
    attention = 2 * hidden * hidden * (1 + kv_heads / heads)
    left = (total - 2 * vocab * hidden) / layers - attention
    found = round(left / (3 * hidden) / 256) * 256
    return found if hidden <= found <= 8 * hidden else rule


def parameters(text: str) -> float | None:
    """``"8.03e9"``, ``"22B"``, ``"1T"`` as a number."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([MBT]?)\s*", text, re.IGNORECASE)
    if match is None:
        return None
    return float(match[1]) * {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()]


def partition_of(notes: str, layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers by stage of a stated ``pipeline partition [0, 4, …]``; units beside the layers stand at both ends."""
    match = re.search(r"partition \[([0-9, ]+)\]", notes)
    if match is None or stages == 1:
        return None
    borders = [int(border) for border in match[1].split(",")]
    before = (borders[-1] - layers) // 2
    inside = [min(max(border - before, 0), layers) for border in borders]
    counts = tuple(after - first for first, after in itertools.pairwise(inside))
    return counts if len(counts) == stages and sum(counts) == layers else None


# ---- Measurements ----


def measured_s(row: Row, batch: int, devices: int) -> float:
    """Seconds a step, from whatever unit the run was published in."""
    value = next((found for name in MEASURED if (found := _float(row, name)) is not None), None)
    unit = row.get("unit", "").lower()
    if value is None or value <= 0:
        raise Unreadable("no measurement")
    tokens = batch * _int(row, "seq")
    if unit.startswith("ms"):
        return value / 1e3
    if re.match(r"(s|sec|secs|second|seconds)\b", unit):
        return value
    sharing = devices if "gpu" in unit or "device" in unit else 1
    if "tokens/s" in unit:
        return tokens / (value * sharing)
    if re.search(r"(samples|sequences|seqs|images)/s", unit):
        return batch / (value * sharing)
    if "flop" in unit:
        scale = 1e15 if unit.startswith("pflop") else 1e12
        return step_flops(row, batch, again="recompute" in unit or "96" in unit) / (value * scale * devices)
    if re.match(r"(it|iter|iterations|steps)/s", unit):
        return 1 / value
    raise Unreadable(f"unit {row.get('unit', '')!r} is not known")


def step_flops(row: Row, batch: int, *, again: bool) -> float:
    """FLOPs of a step by Megatron-LM's formula (Narayanan et al., SC'21, equation 3), forward ``again`` or not.

    Models with a gated MLP or experts, which the formula is not about: 6 a parameter and token, and attention's.
    """
    layers, hidden, seq, vocab = (_int(row, name) for name in ("layers", "hidden", "seq", "vocab"))
    passes = 4 if again else 3
    total = parameters(row.get("params", ""))
    if "llama" in row.get("model", "").lower() and total is not None:
        return passes * batch * seq * (2 * total + 4 * layers * hidden * seq)
    layer = 24 * batch * seq * hidden**2 * (1 + seq / (6 * hidden))
    return passes * layers * layer + 6 * batch * seq * hidden * vocab


# ---- Cells ----


def _int(row: Row, name: str, default: int | None = None) -> int:
    value = _float(row, name)
    if value is None:
        if default is None:
            raise Unreadable(f"{name} is not stated")
        return default
    return int(value)


def _float(row: Row, name: str) -> float | None:
    """A cell's number; of `"8+8"` the sum, of `"8 (two nodes)"` the first."""
    text = (row.get(name) or "").strip()
    parts = re.split(r"\s*\+\s*(?=\d)", text) if re.match(r"\d+\s*\+", text) else [text]
    found = [NUMBER.match(part) for part in parts]
    if not all(found):
        return None
    value = sum(float(match[0]) for match in found if match)
    return value if math.isfinite(value) else None
