"""Steps of an emitted package on this process, timed by part. What `pdv bench` starts, by torchrun or alone:

    python -m learned_cost.profile.steps REQUEST.json

The request says which package, inputs and time; rank 0 writes the answer beside it. Plain steps are timed whole.
In others every collective is waited for where it is called, so that what is left is computing; in others again each of
the equal blocks is. A step is ``train_step`` and AdamW, or a forward pass. Entry point: ``main``.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from learned_cost.devices.device import find, load_records
from learned_cost.profile.allocations import changes, held_bytes, peak_bytes, peak_of

WARM = 3  # steps: the first makes the optimizer's state, the next meet its memory
FEWEST, MOST = 5, 100  # steps of each kind
AHEAD = 5  # steps in a row
CALLS = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
Answer = dict[str, Any]  # Any: JSON


def main() -> None:
    """Run what the request says."""
    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    if request["device"] == "cpu":
        torch.set_num_threads(1)
    calls = Calls(torch.device(request["device"]))
    calls.watch()  # before the package is imported, which binds some of them
    package = importlib.import_module(request["package"])
    steps = Steps(package.build(device=request["device"]), request, calls)
    answer = steps.run(float(request["budget_s"]))
    answer["record"] = request["record"] = known_as(request["record"], calls.device)
    if dist.is_initialized():
        keep_collectives(request, calls.device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.with_name("answer.json").write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Calls:
    """Collectives as they are called: while ``recording``, each is waited for, and its seconds are kept."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recording = False
        self.seconds = 0.0
        self.found: dict[tuple[str, int, int], list[float]] = {}

    def watch(self) -> None:
        """Stand between ``torch.distributed`` and who calls it."""
        for name, collective in CALLS.items():
            if hasattr(dist, name):
                setattr(dist, name, self._watched(getattr(dist, name), collective))

    def _watched(self, call: Callable[..., Any], collective: str) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:  # Any: as torch's own
            if not self.recording:
                return call(*given, **named)
            self.recording = False  # one may call another
            try:
                began = self.now()
                work = call(*given, **named)
                if work is not None:
                    work.wait()
                seconds = self.now() - began
            finally:
                self.recording = True
            tensors = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
            size = max(x.numel() * x.element_size() for x in tensors)
            key = collective, size, dist.get_world_size(named.get("group"))
            self.found.setdefault(key, []).append(seconds)
            self.seconds += seconds
            return work

        return watched

    def now(self) -> float:
        """Seconds, when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Blocks:
    """Equal blocks of a model: seconds of a block forward and backward, without collectives, while ``recording``."""

    def __init__(self, model: nn.Module, calls: Calls) -> None:
        self._calls = calls
        self._began: dict[object, tuple[float, float]] = {}
        self.runs = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
        self.found: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name, _ in self.runs}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks are there meanwhile."""
        handles = []
        for name, run in self.runs:
            for block in run:
                handles.append(block.register_forward_pre_hook(self._enter(block)))
                handles.append(block.register_forward_hook(self._leave(name, block)))
        yield
        for handle in handles:
            handle.remove()

    def _enter(self, block: nn.Module) -> Callable[..., None]:
        def enter(module: nn.Module, given: tuple[Any, ...]) -> None:  # as torch calls it
            self._start(block)

        return enter

    def _leave(self, name: str, block: nn.Module) -> Callable[..., None]:
        def leave(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            self._stop(name, "forward", block)
            sent = [x for x in (made if isinstance(made, tuple) else (made,)) if isinstance(x, Tensor)]
            read = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
            if not read or not any(x.requires_grad for x in sent):
                return
            last: Any = next(x for x in sent if x.requires_grad)  # Any: torch types no hooks of tensors
            first: Any = read[0]
            last.register_hook(lambda grad: self._start((block, "backward")))
            first.register_hook(lambda grad: self._stop(name, "backward", (block, "backward")))

        return leave

    def _start(self, key: object) -> None:
        self._began[key] = self._calls.now(), self._calls.seconds

    def _stop(self, name: str, way: str, key: object) -> None:
        if (began := self._began.pop(key, None)) is not None:
            waited = self._calls.seconds - began[1]
            self.found[name][way].append(self._calls.now() - began[0] - waited)

    def answer(self) -> list[Answer]:
        """By run of equal blocks, medians of a block; None where it has no such pass of its own."""
        return [
            {
                "name": name,
                "blocks": len(run),
                **{f"{way}_s": _middle(s) if s else None for way, s in self.found[name].items()},
            }
            for name, run in self.runs
        ]


class Steps:
    """A model with its optimizer and one batch."""

    def __init__(self, model: Any, request: Mapping[str, Any], calls: Calls) -> None:  # Any: an emitted model
        self._model, self._calls, self._train = model, calls, request["mode"] == "train"
        torch.manual_seed(0)
        self._inputs = [_value(entry, calls.device) for entry in request["inputs"]]
        self._target = _value(request["target"], calls.device)
        # fused, as docs/training.md says and prices are
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if self._train else None

    def run(self, budget_s: float) -> Answer:
        """Rank 0 has the slowest rank's medians; of blocks and collectives its own."""
        for _ in range(WARM):
            self.step()
        each = _slowest(sum(self.step()))
        count = max(FEWEST, min(MOST, int(budget_s / 3 / max(each, 1e-6))))
        plain = [self.step() for _ in range(count)]
        whole = self._whole(count) if self._calls.device.type == "cuda" else [sum(one) for one in plain]
        self._calls.recording = True
        apart = []
        for _ in range(max(FEWEST, count // 2)):
            before = self._calls.seconds
            apart.append((self.step()[0], self._calls.seconds - before))
        blocks = Blocks(self._model, self._calls)
        with blocks.recording():
            for _ in range(FEWEST):
                self.step()
        self._calls.recording = False
        steps = len(apart) + FEWEST
        return {
            "steps": count,
            "step_s": _slowest(statistics.median(whole)),
            "std_s": statistics.pstdev(whole),
            "passes_s": _slowest(statistics.median(one[0] for one in plain)),
            "optimizer_s": _slowest(statistics.median(one[1] for one in plain)),
            "compute_s": _slowest(statistics.median(one - waited for one, waited in apart)),
            "collectives": [
                {"collective": name, "bytes": size, "devices": n, "count": len(s) / steps, "seconds": _middle(s)}
                for (name, size, n), s in sorted(self._calls.found.items())
            ],
            "blocks": blocks.answer(),
            "peak_bytes": _slowest(self._peak()),
        }

    def step(self, *, waits: bool = True) -> tuple[float, float]:
        """Seconds of the passes, and of the optimizer; of what the host does alone where it does not wait."""
        now = self._calls.now if waits else time.perf_counter
        began = now()
        if self._optimizer is None:
            with torch.no_grad():
                self._model(*self._inputs)
            return now() - began, 0.0
        self._model.train_step(tuple(self._inputs), self._target, _loss)
        trained = now()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return trained - began, now() - trained

    def _whole(self, count: int) -> list[float]:
        """Seconds of a step in each of some runs of steps between which no one waits: hosts run ahead of devices."""
        found = []
        for _ in range(max(FEWEST, count // AHEAD)):
            began = self._calls.now()
            for _ in range(AHEAD):
                self.step(waits=False)
            found.append((self._calls.now() - began) / AHEAD)
        return found

    def _peak(self) -> float:
        moments = [] if self._optimizer is None else self._optimizer.state.values()
        states = [x for state in moments for x in state.values() if isinstance(x, Tensor)]
        there = [*self._model.parameters(), *self._model.buffers(), *states, *self._inputs, self._target]
        if self._calls.device.type == "cuda":
            return float(peak_bytes(self.step, there))
        # gloo's threads may let go of a collective's tensors any time later, so the least of some
        return float(held_bytes(there) + min(peak_of(changes(self.step)) for _ in range(FEWEST)))


def known_as(record: str | None, device: torch.device) -> str | None:
    """The record's name if this is such a device: measurements are kept under no other's."""
    known = load_records()
    wanted = None if record is None else known.get(record)
    if wanted is None or (wanted.kind == "cpu") != (device.type == "cpu"):
        return None
    return (
        record if device.type == "cpu" or find(torch.cuda.get_device_name(device), known.values()) == wanted else None
    )


def keep_collectives(request: Mapping[str, Any], device: torch.device) -> None:
    """Collectives of all sizes among all processes, behind a product, as rows of the folder."""
    from learned_cost.profile.collectives import run
    from learned_cost.profile.rows import Setting

    if request["record"] is None:
        return
    setting = Setting.here(device, load_records()[request["record"]])
    size = dist.get_world_size()
    run(
        Path(request["folder"]), setting, device, budget_s=float(request["budget_s"]), per_node=size,
        system=f"{device.type}-{size}-a-node",
    )  # fmt: skip


def _value(entry: Mapping[str, Any], device: torch.device) -> Tensor:
    """Random: normal numbers, or integers from ``least`` up to ``below``."""
    dtype = getattr(torch, entry["dtype"])
    if dtype.is_floating_point:
        return torch.randn(entry["shape"], device=device).to(dtype)
    if dtype is torch.bool:
        return torch.ones(entry["shape"], dtype=dtype, device=device)
    least, below = entry["least"], max(entry["below"], entry["least"] + 1)
    return torch.randint(least, below, entry["shape"], device=device).to(dtype)


def _loss(output: Any, target: Tensor) -> tuple[Tensor, int]:  # Any: a tensor, or several
    """Of the first output: cross entropy against class ids, or squares against numbers."""
    several = output.values() if isinstance(output, dict) else output
    first: Tensor = output if isinstance(output, Tensor) else next(iter(several))
    if target.dtype.is_floating_point:
        return mse_loss(first, target, reduction="sum"), target.numel()
    return cross_entropy(first.flatten(0, -2), target.flatten(), reduction="sum"), target.numel()


def _middle(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)


def _slowest(seconds: float) -> float:
    """The most of all ranks."""
    if not dist.is_initialized():
        return seconds
    told: Sequence[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(told, seconds)
    return max(told)


if __name__ == "__main__":
    main()
