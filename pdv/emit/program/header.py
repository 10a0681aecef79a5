"""The docstring at the top of model.py: what this program is, what it was predicted to cost, how sure that is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from ir.graph import Graph
from ir.mesh import Mesh
from pdv.emit.analysis.names import plain
from pdv.emit.analysis.staged import ONCE, Running
from pdv.emit.program.code import WIDTH
from pdv.problem.precision import MASTER, ROUNDED
from pdv.problem.workload import STALE

Fields = Mapping[str, object]


def header(document: Fields, graph: Graph, mesh: Mesh, running: Running = ONCE) -> str:
    """The module docstring; what the plan's document does not say is left out."""
    shape = " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes) or "one device"
    several = f", {running.virtual} on each," if running.virtual > 1 else ""
    shape = f"a pipeline of {running.stages} stages{several} of {shape}" if running.stages > 1 else f"the mesh {shape}"
    name = plain(str(_at(document, "source", "name") or graph.name))
    lines = [_fill(f'"""{name}, sharded for {shape} ({_processes(mesh, running)}), or whole on one.'), ""]
    facts = {
        "model": _hash(_at(document, "source", "hash")),
        "cluster": _text(_at(document, "cluster", "name")),
        "techniques": _techniques(_at(document, "techniques")),
        "runs as": _steps(running),
        "precision": _precision(running),
        "offload": _offload(running),
        "step": _step(_at(document, "predicted", "step_time_s"), train=_at(document, "mode") != "infer"),
        "memory": _memory(_at(document, "predicted", "memory_bytes")),
        "search": _search(_at(document, "search")),
        "proof": _proof(_at(document, "proof")),
        "command": _text(_at(document, "command")),
    }
    width = max(len(key) for key in facts)
    known = [_fill(f"{key:<{width}}  {text}", width + 2) for key, text in facts.items() if text]
    lines += [*known, *([""] if known else [])]
    lines += ["Written by pdv; edit it as you like. parallel.py explains the operators that name an axis.", '"""']
    return "\n".join(line.rstrip() for line in lines)


def _fill(text: str, indent: int = 0) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent)


def _processes(mesh: Mesh, running: Running) -> str:
    count = mesh.num_devices * running.length
    return "1 process" if count == 1 else f"{count} processes"


def _steps(running: Running) -> str:
    count = running.micro_batches
    parts = [f"{count} micro-batches"] if count > 1 else []
    parts += [f"each in {running.moments} slices in time (slices.py)"] if running.moments > 1 else []
    parts += [running.order] if running.stages > 1 else []
    parts += ["gradients of weights one step old (later.py)"] if running.stages > 1 and running.order in STALE else []
    parts += ["the forward of each layer again in backward"] if running.recompute else []
    parts += ["what is cheap to make again of what is kept (remembered.py)"] if running.light else []
    return ", ".join(parts)


def _precision(running: Running) -> str:
    kept = f"{ROUNDED.torch_name}, of parameters, gradients and moments in {MASTER.torch_name} (rounding.py)"
    parts = [kept] if running.masters else []
    parts += [f"products of layers in {running.scaled.format} (float8.py)"] if running.scaled else []
    parts += ["compiled part by part (torch.compile)"] if running.compiled else []
    return "; ".join(parts)


def _offload(running: Running) -> str:
    words = ["the optimizer, with parameters, in the host's memory (rounding.py)"] if running.offload else []
    kept = "of layers what they take" if running.recompute else "of layers what backward needs"
    words += [f"{kept}, in the host's memory (rounding.py)"] if running.hosted else []
    return "; ".join(words)


def _at(document: object, *path: str) -> object:
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return plain(" ".join(str(part) for part in value))
    return plain(str(value)) if value else ""


def _hash(value: object) -> str:
    return f"hash {_text(value)}" if value else ""


def _techniques(value: object) -> str:
    if isinstance(value, Mapping):
        return plain("; ".join(f"{_together(names)} over {axis}" for axis, names in value.items() if names))
    if isinstance(value, list | tuple):
        return plain(_together(value))
    return _text(value)


def _together(names: Iterable[object]) -> str:
    """``tensor parallel (column, row), ZeRO-2`` of names of which each has one kind in parentheses, or none."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        head, _, kind = str(name).removesuffix(")").partition(" (")
        kinds.setdefault(head, []).extend([kind] if kind else [])
    return ", ".join(f"{head} ({', '.join(found)})" if found else head for head, found in kinds.items())


def _step(value: object, *, train: bool) -> str:
    if not isinstance(value, Mapping) or "mean" not in value:
        return ""
    mean, std = seconds(float(value["mean"])), seconds(float(value.get("std", 0.0)))
    return f"predicted {mean} +- {std} a {'training step' if train else 'forward pass'}"


def _memory(value: object) -> str:
    if isinstance(value, Mapping) and value:
        sizes = ", ".join(f"{_bytes(float(size))} on {plain(str(name))}" for name, size in value.items())
        return f"predicted {sizes}"
    return ""


def _search(value: object) -> str:
    if not isinstance(value, Mapping) or "gap" not in value:
        return ""
    name = plain(str(value.get("strategy")))
    if value["gap"] is None:
        return f"found by the {name} search, which knows no lower bound"
    return f"at most {float(value['gap']):.1%} above the lower bound of the {name} search"


def _proof(value: object) -> str:
    bound = _at(value, "error_bound")
    return f"equal to the source over Z_p; probability of a false proof {float(str(bound)):.0e}" if bound else ""


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.2f} MiB"


def seconds(value: float) -> str:
    """Three digits, in seconds or milliseconds."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
