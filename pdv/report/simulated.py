"""What a simulation tells people: a document of plain data, and its text.

Decides which figures are told and how they are named; works none of them out but model FLOP/s. Entry points:
``simulated_document`` and ``simulated_text``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ir.cost_model import PASSES, model_flops
from ir.graph import Graph, Node
from ir.sharding import format_sharding
from ir.verify import infer_shardings
from pdv.cluster.units import MEMORY
from pdv.problem.workload import STALE
from pdv.report.layers import layer_names

if TYPE_CHECKING:
    from pdv.memory import StageMemory, StepMemory
    from pdv.problem.workload import Workload
from pdv.simulate.result import Share, Simulation

Document = dict[str, Any]  # Any: JSON
VERSION = 1
# parts of a step in the order of reports; others are communication, by mesh axis
ORDER = ("compute", "recomputation", "optimizer", "host", "waiting", "bubble")
WORDS = {
    "host": "host gaps",
    "bubble": "pipeline bubble",
    "pipeline": "exposed sends between stages",
    "tied": "sums between stages",
    "waiting": "waiting for other devices",
}
SHORT = {"pipeline": "sends", "tied": "tied", "recomputation": "recompute"}
SMALL = 0.0005  # of a step: not worth a line


def step_facts(step: Simulation, memory: StepMemory) -> Document:
    """What plan.json says of a step of the emitted program."""
    fullest: dict[str, float] = {}
    for entry in memory.stages:
        fullest[entry.device.name] = max(entry.total_bytes, fullest.get(entry.device.name, 0.0))
    return {
        "step_s": step.step_s,
        "std_s": step.std_s,
        "breakdown_s": order_shares(step.totals),
        "peak_bytes": fullest,
        "fits": memory.fits,
        **({"host_bytes": on_host} if (on_host := memory.host_bytes) else {}),
    }


def simulated_document(
    workload: Workload, simulation: Simulation, memory: StepMemory, configuration: str | None = None
) -> Document:
    """Everything that is told of one simulated step; ``configuration``: the user's own words, if they were given."""
    problem, execution, graph = workload.problem, workload.execution, workload.problem.graph
    flops = model_flops(graph) * PASSES[problem.mode] * execution.micro_batches
    devices = workload.cluster.num_devices
    samples, tokens = _samples(graph)
    peak = sum(entry.device.peak(_dtype(graph)) * entry.count for entry in workload.cluster.classes)
    return {
        "simulation_version": VERSION,
        "model": {"name": graph.name, "parameters": sum(_elements(x) for x in graph.params if x.needs_grad)},
        "cluster": {"name": workload.cluster.name, "num_devices": devices},
        "configuration": configuration,
        "mode": problem.mode,
        "mesh": {
            axis.name: axis.size
            for axis, link in zip(problem.mesh.axes, workload.axes[0], strict=True)
            if link.size == axis.size  # that of time is none of devices
        },
        "pipeline": {
            "stages": workload.stages.count,
            "chunks": workload.stages.chunks,
            "layers": list(workload.stages.layers),
            "micro_batches": execution.micro_batches,
            "order": execution.order,
            "recompute": execution.recompute,
            "zero": execution.zero,
            **({"slices": execution.moments} if execution.moments > 1 else {}),
        },
        "step_s": simulation.step_s,
        "std_s": simulation.std_s,
        "samples_per_s": samples * execution.micro_batches / simulation.step_s,
        "tokens_per_s": None if tokens is None else tokens * execution.micro_batches / simulation.step_s,
        "model_flops": flops,
        "flops_per_s_per_device": flops / simulation.step_s / devices,
        "mfu": flops / simulation.step_s / peak,
        "breakdown_s": order_shares(simulation.totals),
        "sources_s": dict(simulation.seconds_by_source),
        "stages": _stages(simulation.breakdown, memory.stages),
        "fits": memory.fits,
        "peak_bytes": memory.worst.total_bytes,
        "operators": _operators(workload),
    }


def order_shares(parts: Mapping[str, float]) -> dict[str, float]:
    """By the order of reports, communication after compute."""
    names = [name for name in ORDER if name in parts]
    others = sorted((name for name in parts if name not in ORDER), key=lambda name: -parts[name])
    place = sum(name in ("compute", "recomputation") for name in names)
    return {name: parts[name] for name in (*names[:place], *others, *names[place:])}


def _samples(graph: Graph) -> tuple[int, int | None]:
    """Samples of a micro-batch over all ranks, and tokens, if the model reads any."""
    if not graph.inputs:
        return 1, None
    first = graph.inputs[0].type
    samples = first.shape[0] if first.rank else 1
    tokens = samples * first.shape[1] if first.rank == 2 and not first.dtype.is_floating else None
    return samples, tokens


def _dtype(graph: Graph) -> str:
    """What products compute in."""
    product = next((n for n in graph.nodes if n.op.kind in ("contraction", "stencil")), None)
    return "float32" if product is None else product.type.dtype.torch_name


def _elements(node: Node) -> int:
    return math.prod(node.type.shape)


def _stages(shares: Sequence[Share], memory: Sequence[StageMemory]) -> list[Document]:
    """By stage and kind of device."""
    found = {(entry.stage, entry.device.name): entry for entry in memory}
    return [
        {
            "stage": share.stage,
            "device": share.device,
            "count": share.count,
            "breakdown_s": order_shares(share.seconds),
            "memory": _memory(found.get((share.stage, share.device))),
        }
        for share in shares
    ]


def _memory(entry: StageMemory | None) -> Document | None:
    if entry is None:
        return None
    return {
        "total_bytes": entry.total_bytes,
        "device_bytes": entry.device.memory_bytes,
        "peak_bytes": entry.peak_bytes,
        "when": entry.when,
        "by_kind_bytes": entry.by_kind,
        "fits": entry.fits(),
    }


def _operators(workload: Workload) -> list[Document]:
    """Operators by kind and name, with how their result is cut, and in how many layers."""
    mesh = workload.problem.mesh
    shardings = infer_shardings(workload.pcg, mesh)
    counts: Counter[tuple[str, str, str]] = Counter()
    names = layer_names(workload.pcg)
    for node in workload.pcg.nodes:
        if node.is_leaf or node.op.kind == "parallel":
            continue
        product = node.op.kind in ("contraction", "stencil", "index")
        if product or node.op.has_scores or node.op.is_row_norm:
            counts[node.op.name, names.get(node, node.name), format_sharding(shardings[node])] += 1
    return [{"op": op, "name": name, "sharding": text, "count": count} for (op, name, text), count in counts.items()]


# ---- Text ----


def simulated_text(document: Mapping[str, Any]) -> str:
    """The document as people read it."""
    model, cluster, pipeline = document["model"], document["cluster"], document["pipeline"]
    degrees = " x ".join(f"{name}={size}" for name, size in document["mesh"].items()) or "one device"
    if pipeline["stages"] > 1:
        degrees = f"{pipeline['stages']} stages of {degrees}"
    rows = {
        "model": f"{model['name']}, {count_text(model['parameters'])} parameters",
        "cluster": f"{cluster['name']}, {cluster['num_devices']} devices",
        **({"settings": document["configuration"]} if document["configuration"] else {}),
        "runs as": f"{degrees}, {_steps(pipeline)}",
        "step": f"{seconds_text(document['step_s'])} ± {seconds_text(document['std_s'])} ({_price(document)})",
        "speed": _speed(document),
        "memory": "; ".join(memory_lines(document)),
    }
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, "", *time_table(document), *_stage_table(document)])


def _steps(pipeline: Mapping[str, Any]) -> str:
    count = pipeline["micro_batches"]
    text = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    text += f", {pipeline['order']}" if pipeline["stages"] > 1 else ""
    text += ", gradients of weights one step old" if pipeline["stages"] > 1 and pipeline["order"] in STALE else ""
    text += f", in {pipeline['slices']} slices in time" if pipeline.get("slices", 1) > 1 else ""
    text += f", {pipeline['chunks'] // pipeline['stages']} chunks a stage" if pipeline["order"] == "interleaved" else ""
    text += f", ZeRO-{pipeline['zero']}" if pipeline["zero"] else ""
    return text + (f", recomputation {pipeline['recompute']}" if pipeline["recompute"] != "none" else "")


def _price(document: Mapping[str, Any]) -> str:
    total = sum(document["sources_s"].values())
    shares = sorted(document["sources_s"].items(), key=lambda item: -item[1])
    return ", ".join(f"{100 * seconds / total:.0f} % {name}" for name, seconds in shares if total) or "nothing to price"


def _speed(document: Mapping[str, Any]) -> str:
    tokens = document["tokens_per_s"]
    what = f"{document['samples_per_s']:.4g} samples/s" if tokens is None else f"{count_text(tokens)} tokens/s"
    rate = document["flops_per_s_per_device"] / 1e12
    return f"{what}; {rate:.3g} TFLOP/s of the model a device, MFU {100 * document['mfu']:.1f} %"


def memory_lines(document: Mapping[str, Any]) -> list[str]:
    """The fullest stage of each kind of device, and whether it fits."""
    fullest: dict[str, Mapping[str, Any]] = {}
    for entry in document["stages"]:
        known = fullest.get(entry["device"])
        if entry["memory"] and (known is None or entry["memory"]["total_bytes"] > known["memory"]["total_bytes"]):
            fullest[entry["device"]] = entry
    return [_memory_line(entry, len({one["stage"] for one in document["stages"]})) for entry in fullest.values()]


def _memory_line(entry: Mapping[str, Any], stages: int) -> str:
    memory = entry["memory"]
    left = memory["device_bytes"] - memory["total_bytes"]
    verdict = "fits" if left >= 0 else f"does not fit, by {MEMORY.format(-left)}"
    where = f"stage {entry['stage']}, " if stages > 1 else ""
    held = ", ".join(f"{kind} {MEMORY.format(size)}" for kind, size in list(memory["by_kind_bytes"].items())[:4])
    total, whole = MEMORY.format(memory["total_bytes"]), MEMORY.format(memory["device_bytes"])
    return f"{verdict}: {total} of {whole} on {where}{entry['device']} ({held})"


def time_table(document: Mapping[str, Any]) -> list[str]:
    """Where the mean device's time goes."""
    step = document["step_s"]
    parts = [(name, time) for name, time in order_shares(document["breakdown_s"]).items() if time > SMALL * step]
    width = max((len(part_text(name)) for name, _ in parts), default=0)
    rows = [
        f"  {part_text(name):<{width}}  {seconds_text(time):>9}  {100 * time / step:5.1f} %" for name, time in parts
    ]
    return ["time goes to", *rows]


def part_text(name: str) -> str:
    """A part of a step in words."""
    return WORDS.get(name, name if name in ORDER else f"exposed communication, {name}")


def _stage_table(document: Mapping[str, Any]) -> list[str]:
    """By stage, where stages differ by more than a hundredth in any part."""
    stages, step = document["stages"], document["step_s"]
    names = [name for name, time in order_shares(document["breakdown_s"]).items() if time > 0.002 * step]
    columns = [[entry["breakdown_s"].get(name, 0.0) for entry in stages] for name in names]
    if len(stages) == 1 or all(max(column) - min(column) < 0.01 * step for column in columns):
        return []
    heads = [SHORT.get(name, name) for name in names]
    head = f"  {'stage':<7}" + "".join(f"{name:>11}" for name in heads) + f"{'memory':>13}"
    rows = []
    for number, entry in enumerate(stages):
        times = "".join(f"{100 * column[number] / step:9.1f} %" for column in columns)
        held = MEMORY.format(entry["memory"]["total_bytes"]) if entry["memory"] else ""
        rows.append(f"  {entry['stage']:<7}{times}{held:>13}")
    return ["", "by stage", head, *_abridge(rows)]


def _abridge(rows: list[str], most: int = 12) -> list[str]:
    """First and last rows of many."""
    if len(rows) <= most:
        return rows
    half = most // 2
    return [*rows[:half], f"  … {len(rows) - 2 * half} more …", *rows[-half:]]


def seconds_text(seconds: float) -> str:
    """Three digits, with a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:.0f} {unit}"
    raise AssertionError(seconds)


def count_text(number: float) -> str:
    """``4.06e11`` as 406 B."""
    for unit, size in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"
