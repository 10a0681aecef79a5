"""Functions of torch, and small nets of several kinds: what is emitted of them against the modules themselves.

    python benchmarks/functions.py [--only conv_transpose gelu ...] [--rounds 12] [--json OUT] [--smoke]

Each is read, written for one device and built, and both step in turns on one thread: forward, a loss and backward, in
CPU time of the thread. A ratio is that of medians, emitted over module; what both compute is compared.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.record import Record, arguments, table
from ir.mesh import Mesh
from pdv.emit.package import emit_package
from pdv.frontend import load_program

SLOW = 1.15  # times a module's time, of which is told
WARM, FEWEST = 2, 3
TOLERANCE = 1e-4
IMAGES, ROWS, SIGNALS = (4, 64, 32, 32), (8, 128, 256), (8, 256, 128)
Made = tuple[Callable[..., Tensor], tuple[Callable[[], nn.Module], ...]]


class Applied(nn.Module):
    """A function, with the modules that it takes, behind a product with one number that is trained."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts, self.factor = function, nn.ModuleList(parts), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """See nn.Module."""
        return self.function(x * self.factor, *self.parts)


class Denoiser(nn.Module):
    """Convolutions between norms of groups, a level down and up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.last = nn.Conv2d(64, 64, 3, 1, 1), nn.Conv2d(64, 64, 3, 2, 1), nn.Conv2d(64, 64, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, 64) for _ in range(3))
        self.inner, self.up = nn.Conv2d(64, 64, 3, 1, 1), nn.ConvTranspose2d(64, 64, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """See nn.Module."""
        x = self.first(F.silu(self.norms[0](x)))
        h = self.inner(F.silu(self.norms[1](self.down(x))))
        out: Tensor = self.last(F.silu(self.norms[2](x + self.up(h))))
        return out


class Patches(nn.Module):
    """A residual stream of patches, without a token of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(64, 128, 4, 4), nn.LayerNorm(128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        """See nn.Module."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        for _ in range(3):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x.mean(1)


def _first(found: Any) -> Tensor:  # Any: what a module returns
    return found if isinstance(found, Tensor) else _first(found[0])


def _module(x: Tensor, part: nn.Module) -> Tensor:
    return _first(part(x))


OF_IMAGES: Mapping[str, Made] = {
    "pad": (lambda x: F.pad(x, (3, 3, 3, 3)), ()),
    "pad, reflected": (lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), ()),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), ()),
    "interpolate, nearest": (lambda x: F.interpolate(x, scale_factor=2), ()),
    "interpolate, bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ()),
    "interpolate, bicubic": (lambda x: F.interpolate(x, size=45, mode="bicubic"), ()),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), ()),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 7), ()),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), ()),
    "batch_norm": (_module, (partial(nn.BatchNorm2d, 64),)),
    "group_norm": (_module, (partial(nn.GroupNorm, 8, 64),)),
    "instance_norm": (_module, (partial(nn.InstanceNorm2d, 64, affine=True),)),
    "prelu": (_module, (partial(nn.PReLU, 64),)),
    "conv2d": (_module, (partial(nn.Conv2d, 64, 64, 3, padding=1),)),
    "conv2d, by channel": (_module, (partial(nn.Conv2d, 64, 64, 7, padding=3, groups=64),)),
    "conv_transpose2d": (_module, (partial(nn.ConvTranspose2d, 64, 32, 2, 2),)),
    "conv_transpose2d, overlapping": (_module, (partial(nn.ConvTranspose2d, 64, 32, 4, 2, 1),)),
    "a denoiser": (_module, (Denoiser,)),
    "patches": (_module, (Patches,)),
}
OF_ROWS: Mapping[str, Made] = {
    **{
        name: (getattr(F, name), ())
        for name in ("gelu", "silu", "mish", "elu", "selu", "celu", "relu6", "hardswish", "softplus", "logsigmoid")
    },
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), ()),
    "softmax": (lambda x: x.softmax(-1), ()),
    "log_softmax, of another dim": (lambda x: x.log_softmax(1), ()),
    "normalize": (lambda x: F.normalize(x, dim=-1), ()),
    "std": (lambda x: x.std(1), ()),
    "cumsum": (lambda x: x.cumsum(1), ()),
    "topk": (lambda x: x.topk(8, -1).values, ()),
    "layer_norm": (_module, (partial(nn.LayerNorm, 256),)),
    "rms_norm": (_module, (partial(nn.RMSNorm, 256),)),
    "lstm": (lambda x, part: _module(x[:, :32], part), (partial(nn.LSTM, 256, 128, batch_first=True),)),
    "gru": (lambda x, part: _module(x[:, :32], part), (partial(nn.GRU, 256, 128, batch_first=True),)),
    "attention": (lambda x, part: _first(part(x, x, x)), (partial(nn.MultiheadAttention, 256, 8, batch_first=True),)),
    "a layer of an encoder": (_module, (partial(nn.TransformerEncoderLayer, 256, 8, 1024, 0.0, batch_first=True),)),
}
OF_SIGNALS: Mapping[str, Made] = {"conv1d": (_module, (partial(nn.Conv1d, 256, 256, 3, padding=1),))}
CASES = {
    name: (shape, made)
    for shape, cases in ((IMAGES, OF_IMAGES), (ROWS, OF_ROWS), (SIGNALS, OF_SIGNALS))
    for name, made in cases.items()
}


def main() -> None:
    """Time each, and fail if one differs."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="those whose names begin so")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = [name for name in CASES if not options.only or name.startswith(tuple(options.only))]
    names = ["leaky_relu"] if options.smoke else names
    record = Record()
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for number, name in enumerate(names):
            record.rows.append(compare(name, Path(folder, f"package_{number}"), max(FEWEST, options.rounds)))
            record.write(options.json)
    parts = ("emitted_ms", "module_ms", "ratio")
    shown = [(row["name"], *(f"{row[part]:.2f}" for part in parts)) for row in record.rows]
    table(("function", "emitted ms", "module ms", "ratio"), shown)
    slow = [row["name"] for row in record.rows if row["ratio"] > SLOW]
    record.claim("functions", len(record.rows), "")
    record.claim(f"slower than {SLOW} times their modules", len(slow), "", ", ".join(slow))
    record.claim("emitted over module, median", statistics.median(row["ratio"] for row in record.rows), "x")
    record.print_summary()
    record.write(options.json)


def compare(name: str, package: Path, rounds: int) -> dict[str, Any]:
    """One function, written into a package."""
    shape, (function, parts) = CASES[name]
    module, x = Applied(function, *(make() for make in parts)), torch.randn(shape)
    program = load_program(module, (x,))
    package.mkdir()
    emit_package(program.graph, Mesh.of(), {"mode": "train"}, program.weights, package)
    emitted = importlib.import_module(package.name).build(device="cpu")
    difference = float((emitted(x) - module(x)).abs().max())
    assert difference < TOLERANCE * max(1.0, float(module(x).abs().max())), f"{name}: off by {difference:.1e}"
    taken: dict[str, list[float]] = {"emitted": [], "module": []}
    for _ in range(rounds):
        for side, model in (("emitted", emitted), ("module", module)):
            taken[side].append(step_s(model, x))
    emitted_s, module_s = (statistics.median(taken[side][WARM:]) for side in ("emitted", "module"))
    return {"name": name, "emitted_ms": 1e3 * emitted_s, "module_ms": 1e3 * module_s, "ratio": emitted_s / module_s}


def step_s(model: nn.Module, x: Tensor) -> float:
    """Seconds of this thread's CPU in a step."""
    model.zero_grad()
    began = time.thread_time()
    loss: Tensor = model(x).square().mean()
    torch.autograd.backward(loss)
    return time.thread_time() - began


if __name__ == "__main__":
    main()
