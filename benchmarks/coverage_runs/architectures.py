"""Architectures as their users train them, each in a process of its own: exported, planned, proved, and run as text.

As modules, or as files (``routes``): what is read of these is held against the module first. Entry point: ``survey``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.coverage_runs import SLOW

SECONDS, BYTES = 90, 6 << 30  # of CPU time, each
WALL_SECONDS = 900  # where others use the same cores
OUTCOMES = ("planned", "partly", "refused", "wrong", "crashed")
ROUTES = ("torch", "plain", "whole", "own", "older")
MOST_OPAQUE = 0.05  # of a planned model's operations
MESH = {"dp": 2, "tp": 2}
CLUSTER = {
    "nodes": [
        {
            "count": 2,
            "devices": 2,
            "device": {**SLOW, "memory": "8 GiB", "efficiency": 0.5},
            "link": {"name": "fast-link", "bandwidth": "10 GB/s", "latency": "2 us"},
        }
    ],
    "network": {"name": "fast-network", "bandwidth": "40 Gb/s", "latency": "4 us"},
}


@dataclass(frozen=True)
class How:
    """What is done with each architecture.

    Attributes:
        route: how it reaches pdv, one of ``ROUTES``.
        dropout: with the probabilities of its configuration, else none.
        quick: it is only read, files against the module, too.
        alike: a file of which the same graph is read as of the module is neither run nor planned again: all that is
            done with it would be the same.
        torchrun: the package of a module is run by torchrun, too.
        files: where exported files are kept, and taken from.
        further: models that were taken later, in place of the others.
        larger: those of the models that small sizes harm, larger.
        weights: of files that lack parameters, the module's weights are given, as proof of what was computed of them.
    """

    route: str = "torch"
    dropout: bool = True
    quick: bool = False
    alike: bool = False
    torchrun: bool = False
    files: Path | None = None
    further: bool = False
    larger: bool = False
    weights: bool = False


def survey(only: Sequence[str], share: slice, how: How, report: Callable[[dict[str, Any]], None]) -> None:
    """One row for each architecture: its name, ``planned``, ``wrong`` or ``refused``, and why.

    only: their names, empty for all; share: of these.
    """
    import torch  # noqa: F401  # once, before processes are forked
    import transformers  # noqa: F401

    import pdv.compile
    import pdv.frontend.torch.module  # noqa: F401
    from benchmarks.coverage_runs.further import FURTHER
    from benchmarks.coverage_runs.hub import HUB
    from benchmarks.coverage_runs.larger import LARGER
    from benchmarks.coverage_runs.latest import LATEST
    from benchmarks.coverage_runs.plain import PLAIN
    from benchmarks.coverage_runs.recent import RECENT

    models = {**FURTHER, **LATEST, **RECENT} if how.further else LARGER if how.larger else {**PLAIN, **HUB}
    chosen = [(name, build) for name, build in models.items() if not only or name in only]
    for name, build in chosen[share]:
        started = time.perf_counter()
        row = _apart(lambda name=name, build=build: _try(name, build, how))  # type: ignore[misc]
        report({"architecture": name, "route": how.route, **row, "seconds": round(time.perf_counter() - started, 1)})


def reasons(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """(architectures that name it, of these those that name nothing else, reason), most first."""
    named: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for row in rows:
        found = set(row.get("reasons", ()))
        named.update(found)
        if len(found) == 1:
            alone.update(found)
    return sorted(((named[reason], alone[reason], reason) for reason in named), reverse=True)


def _apart(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` gives in a process of its own, within time and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES + (8 << 30), BYTES + (8 << 30)))  # libraries take addresses too
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                text = json.dumps(run())
        except MemoryError:
            text = json.dumps({"outcome": "refused", "reasons": ["out of memory"]})
        except Exception as error:  # noqa: BLE001  # of the survey's own description of a model
            text = json.dumps({"outcome": "crashed", "reasons": [f"not built: {type(error).__name__}: {error}"[:300]]})
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], WALL_SECONDS)
    found = b""
    if not ready:
        os.kill(child, signal.SIGKILL)
    else:
        while part := os.read(reading, 1 << 16):
            found += part
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if found:
        row: dict[str, Any] = json.loads(found)
        return row
    late = not ready or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU))
    return {"outcome": "refused", "reasons": [f"longer than {SECONDS} s" if late else "the process died"]}


def _try(name: str, build: Callable[[], tuple[Any, dict[str, Any]]], how: How) -> dict[str, Any]:
    import warnings

    import torch

    import pdv
    from benchmarks.coverage_runs.routes import CannotExportError

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, inputs = build()
    module.train()
    if not how.dropout:
        _without_dropout(module)
    try:
        return _as_module(module, inputs, how) if how.route == "torch" else _as_file(name, module, inputs, how)
    except CannotExportError as error:
        return {"outcome": "refused", "reasons": [f"torch cannot export it: {error}"[:300]]}
    except pdv.UnsupportedOperatorsError as error:
        return {
            "outcome": "refused",
            "reasons": sorted({text.split(" at ")[0] + _why(text) for text in error.operators}),
        }
    except pdv.VerificationError as error:  # of programs that agree, one that says too little
        return {"outcome": "refused" if "agree" in error.what else "wrong", "reasons": [error.what[:300]]}
    except pdv.PdvError as error:
        return {"outcome": "refused", "reasons": [error.what[:300]]}
    except Exception as error:  # noqa: BLE001  # whatever escapes is a crash, which is told apart
        return {"outcome": "crashed", "reasons": [f"{type(error).__name__}: {str(error)[:300]}"]}


def _as_module(module: Any, inputs: dict[str, Any], how: How) -> dict[str, Any]:
    import pdv
    from pdv.frontend.load import load_program

    if how.quick:
        load_program(module, inputs)
        return {"outcome": "read"}
    plan = pdv.optimize(module, inputs, cluster=CLUSTER, mesh=MESH, budget_s=30.0)
    row = _of_plan(plan)
    if not how.torchrun:
        return row
    from benchmarks.coverage_runs.launched import TOLERANCE, run

    with tempfile.TemporaryDirectory() as scratch:
        gaps = run(plan, module, inputs, Path(scratch))
    wrong = max(gaps.values()) > TOLERANCE
    return {**row, "torchrun": gaps, **({"outcome": "wrong", "reasons": ["on processes"]} if wrong else {})}


def _as_file(name: str, module: Any, inputs: dict[str, Any], how: How) -> dict[str, Any]:
    """The same of a file, and whether the same graph is read of it as of the module."""
    from safetensors.torch import save_file

    import pdv
    from benchmarks.coverage_runs.routes import differs, export
    from pdv.frontend.load import load_program
    from pdv.planning.frozen import freeze, name_trained
    from pdv.planning.model import check_trained

    with tempfile.TemporaryDirectory() as scratch:
        path = (how.files or Path(scratch)) / f"{how.route}-{name}.onnx"
        if not path.is_file():
            export(how.route, module, inputs, path)
        program, weights = load_program(path), None
        if how.weights and (program.absent or program.folded):
            weights = Path(scratch) / "own.safetensors"
            save_file({key: x.detach().clone() for key, x in module.state_dict().items()}, weights)
            program = load_program(path, checkpoint=weights)
        if program.doubts:
            return {"outcome": "partly", "reasons": [text[:300] for text in program.doubts]}
        frozen = sorted(_frozen(module) & {*name_trained(program), *program.absent})
        program = freeze(program, frozen)
        alike = program.graph.digest == load_program(module, inputs).graph.digest
        said = {"alike": alike, **({"freeze": frozen} if frozen else {}), **({"weights": True} if weights else {})}
        if alike and how.alike:
            return {"outcome": "alike", "reasons": [], **said}
        check_trained(program)
        if why := differs(program, module, inputs):
            return {"outcome": "wrong", "reasons": [why[:300]], **said}
        if how.quick:
            return {"outcome": "read", "reasons": [], **said}
        plan = pdv.optimize(path, cluster=CLUSTER, mesh=MESH, budget_s=30.0, freeze=frozen, weights=weights)
        return {**_of_plan(plan), **said}


def _frozen(module: Any) -> set[str]:
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def _why(text: str) -> str:
    return f" ({text.split(' (', 1)[1]}" if " (" in text else ""


def _of_plan(plan: Any) -> dict[str, Any]:
    """Planned, if reading and text were run, something is cut, and little is opaque, no contraction among it."""
    from benchmarks.coverage_runs.opaque import opaque_work

    reading, run = plan.document["reading"], plan.document["run"]["statement"]
    opaque, products = opaque_work(plan.source)
    share = sum(opaque.values())
    missing = [
        f"the {what} was not run: {text}" for what, text in (("reading", reading), ("text", run)) if "not run" in text
    ]
    if not any(node.op.kind == "parallel" for node in plan.emission.pcg.nodes):
        missing.append("nothing is cut")
    if products:
        missing.append(f"opaque products: {', '.join(products)}")
    if share > MOST_OPAQUE:
        missing.append(f"{share:.0%} of the operations are opaque")
    return {
        "outcome": "partly" if missing else "planned",
        "reasons": [text[:300] for text in missing],
        "predicted_s": plan.document["predicted"]["step_time_s"]["mean"],
        "techniques": plan.document["techniques"],
        "opaque_share": share,
        "opaque": sorted(opaque),
    }


def _without_dropout(module: Any) -> None:
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or "drop" in name or name == "p"):
                setattr(part, name, 0.0)
        config = getattr(part, "config", None)
        for name, value in list(vars(config).items()) if config is not None else []:
            if isinstance(value, float) and ("drop" in name):
                setattr(config, name, 0.0)
