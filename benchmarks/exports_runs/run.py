"""One model by one way of exporting it: exported, planned as README's first command does it, and trained one step.

Entry point: ``run``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import pdv
from benchmarks.exports_runs.models import make
from benchmarks.models.sizes import Size, TensorTuple
from benchmarks.planning import TWO_BY_FOUR
from pdv.check.module_run import Undropped
from pdv.frontend.onnx.export import export_onnx

Array = np.ndarray[Any, Any]  # Any: floats and integers

STAGES = {  # what optimize reports -> a column
    "reading the model": "reading",
    "running what was read against the model": "check",
    "proving": "proof",
    "running the emitted text on simulated ranks": "emission",
    "writing": "emission",
}


def export(route: str, module: torch.nn.Module, inputs: TensorTuple, path: Path) -> TensorTuple:
    """Write the file as a user of this way would; the inputs that it has.

    The older exporter takes all arguments of forward for inputs, and has no operators for working out that there is no
    mask; language models are exported by it with a mask, and their logits alone.
    """
    how, _, mode = route.partition(", ")
    module.train(mode != "eval")
    if how == "own":
        export_onnx(module, inputs, path)
    elif how == "new":
        torch.onnx.export(module, inputs, path, dynamo=True, verbose=False)
    else:
        kind = torch.onnx.TrainingMode.EVAL if mode == "eval" else torch.onnx.TrainingMode.TRAINING
        if not inputs[0].is_floating_point():
            inputs = (*inputs, torch.ones_like(inputs[0]))
            _take_mask(module)
        torch.onnx.export(module, inputs, path, dynamo=False, training=kind)
    module.train()
    return inputs


def _take_mask(module: torch.nn.Module) -> None:
    """Forward of ids and a mask, giving logits."""
    whole = module.forward

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:  # Any: of transformers
        return whole(input_ids=input_ids, attention_mask=attention_mask).logits

    module.forward = forward


def run(model: str, route: str, size: Size) -> dict[str, Any]:
    """CPU-seconds of each part of planning, and how a step of the emitted program compares with one of the module."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    module, inputs = make(model, size)
    seconds: dict[str, float] = dict.fromkeys(("export", "reading", "check", "search", "proof", "emission"), 0.0)
    row = {"model": model, "route": route, "seconds": seconds}
    with tempfile.TemporaryDirectory(prefix="pdv-exports-") as scratch:
        path = Path(scratch) / f"{model}.onnx"
        started = time.process_time()
        try:
            with contextlib.redirect_stdout(None):
                given = export(route, module, inputs, path)
        except Exception as error:  # noqa: BLE001  # whatever torch raises at what it cannot export
            return row | {"result": f"torch cannot export it: {str(error).strip().splitlines()[0][:120]}"}
        seconds["export"] = time.process_time() - started
        try:
            plan, package = _plan(path, Path(scratch) / "out", seconds)
        except pdv.PdvError as error:
            return row | {"result": f"refused: {error}"}
        row["reading"] = plan.document["reading"]
        path.with_name(path.name + ".data").unlink(missing_ok=True)
        return row | _compare(package.build("cpu"), module, inputs, given)


def _plan(path: Path, target: Path, seconds: dict[str, float]) -> tuple[Any, Any]:
    """(the plan, the saved package); adds to the CPU-seconds of each part."""
    last = ["reading", time.process_time()]

    def progress(stage: str, fraction: float | None) -> None:
        del fraction
        now = time.process_time()
        seconds[str(last[0])] += now - float(last[1])
        last[:] = [STAGES.get(stage, "search"), now]

    from pdv.plan.package import import_package

    cluster = target.with_name("cluster.yaml")
    cluster.write_text(TWO_BY_FOUR)
    plan = pdv.optimize(path, cluster=cluster, progress=progress)
    progress("writing", None)
    plan.save(target)
    progress("", None)
    return plan, import_package(target)


def _compare(built: Any, module: torch.nn.Module, inputs: TensorTuple, given: TensorTuple) -> dict[str, Any]:
    """Losses and gradients of a step of each, without dropout; and how many weights keep their names."""
    random = torch.Generator().manual_seed(0)
    drawn: list[torch.Tensor] = []

    def loss_fn(outputs: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        del target
        if not drawn:
            drawn.extend(torch.randn(x.shape, generator=random) / x[0].numel() ** 0.5 for x in found)
        return sum((x * c).sum() for x, c in zip(found, drawn, strict=True)), torch.tensor(1.0)  # type: ignore[return-value]

    with Undropped():
        outputs = module.train()(*inputs)
        loss = loss_fn(outputs, None)[0]
        loss.backward()  # type: ignore[no-untyped-call]
        wanted = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
        values = {name: p.detach().numpy() for name, p in module.named_parameters()}
        state = {name: x.numpy() for name, x in built.full_state_dict().items()}  # before norms move their statistics
        built.eval()
        own = float(built.train_step(list(given), [torch.zeros(len(inputs[0]))], loss_fn, reduction="sum"))
    gradients = {name: x.numpy() for name, x in built.full_gradients().items()}
    named = _by_the_modules_names(state, values)
    gap = abs(own - float(loss)) / max(abs(float(loss)), 1e-30)
    largest = max(float(np.abs(x).max()) for x in wanted.values())
    worst, where = 0.0, ""
    for name, y in wanted.items():
        if name not in named or named[name][0] not in gradients:
            return {"result": f"not trained: {name}", "loss": gap, "gradients": None}
        other, perm = named[name]
        error = float(np.abs(gradients[other].transpose(perm) - y).max()) / largest
        worst, where = max((worst, where), (math.inf if math.isnan(error) else error, name))
    kept = sum(named[name][0] == name for name in wanted)
    same = gap < 1e-3 and worst < 1e-3
    return {
        "result": "trains as the module" if same else f"trains another model ({where})",
        "loss": gap,
        "gradients": worst,
        "names": f"{kept} of {len(wanted)}",
        "parameters": f"{len(gradients)} for {len(wanted)}",
    }


def _by_the_modules_names(
    state: Mapping[str, Array], values: Mapping[str, Array]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The module's name -> the program's name of the same values, and the order of its dims."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, wanted in values.items():
        straight = tuple(range(wanted.ndim))
        orders = [straight, (1, 0)] if wanted.ndim == 2 else [straight]
        names = [name] if name in state else [other for other in state if other not in values]
        for other in names:
            for perm in orders:
                array = state[other]
                if array.ndim == wanted.ndim and np.array_equal(array.transpose(perm), wanted):
                    found.setdefault(name, (other, perm))
    return found
