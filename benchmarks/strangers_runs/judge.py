"""The way of one module, as the README has it. Entry point: ``judge``."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.strangers_runs.catalogue import made
from benchmarks.strangers_runs.training import OPTIMIZERS, Training, difference, train_module, train_package
from ir.errors import InternalError, PdvError
from tests.pdv.worlds import cluster

IN_BFLOAT16 = {"autocast_inside": 8.0, "in_bfloat16": 8.0}  # bits of bfloat16 are fewer: how many times the tolerance
Outcome = Literal["equal", "refused", "wrong", "crash"]


@dataclass(frozen=True)
class Verdict:
    """What became of a module, at which stage, and what was said; ``plan``: its meshes and what is cut."""

    outcome: Outcome
    stage: str = ""
    said: str = ""
    plan: str = ""


def judge(name: str, devices: int, *, real: bool = False, device: str = "cpu", **options: Any) -> Verdict:
    """Planned for so many devices, written, trained in one process on ``device``, and (``real``) on as many.

    The module itself is trained there, too, or on the CPU if it makes tensors there whatever it is given.
    """
    import pdv

    try:
        wanted = {key: _own(name, key, device) for key in OPTIMIZERS}
    except Exception as error:  # noqa: BLE001  # the module's own
        return Verdict("refused", "module", f"does not train by itself: {error}")
    module, inputs = made(name)
    with tempfile.TemporaryDirectory(prefix="stranger-") as where, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(where) / "stranger_pdv"
        plan = _guarded("optimize", lambda: pdv.optimize(module, inputs, cluster=cluster(devices), **options))
        if isinstance(plan, Verdict):
            return plan
        mesh = " ".join(f"{axis.name}={axis.size}" for axis in plan.mesh.axes)
        written = _guarded("save", lambda: plan.save(folder))
        if isinstance(written, Verdict):
            return written
        for key, own in wanted.items():
            alone = _guarded("alone", lambda key=key: [train_package(folder, name, key, device)])  # type: ignore[misc]
            verdict = _compared(f"alone, {key}", name, own, alone)
            if verdict is None and real and plan.mesh.num_devices > 1:
                ranks = _guarded("ranks", lambda key=key: _on_ranks(folder, name, key, plan.mesh.num_devices))  # type: ignore[misc]
                verdict = _compared(f"ranks, {key}", name, own, ranks)
            if verdict is not None:
                return Verdict(verdict.outcome, verdict.stage, verdict.said, mesh)
    return Verdict("equal", plan=mesh)


def _own(name: str, key: str, device: str) -> Training:
    try:
        return train_module(name, key, device)
    except RuntimeError:
        if device == "cpu":
            raise
        return train_module(name, key)


def _on_ranks(folder: Path, name: str, key: str, ranks: int) -> Any:
    from tests.distributed.harness import run_ranks

    return run_ranks(train_package, ranks, folder, name, key, timeout_s=120)


def _compared(stage: str, name: str, wanted: Any, found: Any) -> Verdict | None:
    if isinstance(found, Verdict):
        return found
    for one in found:
        if text := difference(wanted, one, IN_BFLOAT16.get(name, 1.0)):
            return Verdict("wrong", stage, text)
    return None


def _guarded(stage: str, run: Callable[[], Any]) -> Any:
    """What it gives, or the verdict of what it raises."""
    try:
        return run()
    except InternalError as error:
        return Verdict("crash", stage, f"{error}\n{traceback.format_exc(limit=-8)}")
    except PdvError as error:
        return Verdict("refused", stage, str(error))
    except Exception:  # noqa: BLE001  # finding these is what this is for
        return Verdict("crash", stage, traceback.format_exc(limit=-8))
