"""Edits that give what the source does in evaluation, in float64, on the plan's mesh, and are wrong elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import VerificationError
from ir.graph import Graph
from pdv.check import check_text
from pdv.emit.emission import Emission
from pdv.emit.package import emission_of
from pdv.frontend.program import Weights
from pdv.plan.running import running_of
from pdv.prices import priced_by
from pdv.report.loaded import load_document, read_planned
from tests.pdv.worlds import cluster


class Masked(nn.Module):
    """Attention that hides padding, of two heads, and dropout: ids [b, 6] -> [b, 6, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.q, self.k, self.v = nn.Embedding(16, 8), *(nn.Linear(8, 8) for _ in "qkv")
        self.out, self.drop = nn.Linear(8, 8), nn.Dropout(0.25)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = (f(x).unflatten(2, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).masked_fill((ids == 0)[:, None, None, :], -1e9)
        z: Tensor = x + self.drop(self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return z


@dataclass(frozen=True)
class Package:
    """What its text is held to."""

    source: Graph
    program: Emission
    weights: Weights
    files: dict[str, str]


@cache
def package() -> Package:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Masked().train()
    pins = {"mesh": {"tp": 2}, "techniques": {"tp": "tensor"}}
    ids = torch.randint(0, 16, (4, 6))
    plan = pdv.optimize(module, (ids,), cluster=cluster(2), mesh={"tp": 2}, pins=pins, rules="none")
    with TemporaryDirectory() as folder:
        plan.save(Path(folder) / "masked_pdv")
        document, source = read_planned(Path(folder) / "masked_pdv")
    loaded = load_document(document, source, priced_by(document, None))
    running = running_of(loaded.problem, loaded.derived, loaded.stages, loaded.execution)
    program = emission_of(loaded.derived.pcg, loaded.problem.mesh, document, running)
    shapes = {name: entry["shape"] for name, entry in document["weights"].items()}
    weights = Weights({name: partial(np.zeros, shape) for name, shape in shapes.items()})
    return Package(source, program, weights, program.files(document, lambda name: tuple(shapes[name])))


def check_edit(*changes: tuple[str, str], name: str = "model.py") -> None:
    given = package()
    text = given.files[name]
    for before, after in changes:
        assert before in text, text
        text = text.replace(before, after, 1)
    files = {**given.files, name: text}
    assert check_text(given.source, given.program, given.weights, files=files).ran


RUN = "tp = self.tp\n"
WRONG = {
    "another share": ("0.25, self.training", "0.5, self.training", "model.py", "in training"),
    "a dropout besides": ("h = replicate(x, tp)", "h = replicate(F.dropout(x, 0.5, self.training), tp)", "model.py",
                          "in training"),
    "masks that stand still": ("_drawn[0] += 1", "pass", "operators.py", "in training"),
    "half the digits": ("x + dropout(h,", "x + dropout(h.half().float(),", "model.py", "is rounded by"),
    "rows of padding": ("self.constant, y)", "float('-inf'), y)", "model.py", "rows of one id"),
    "on a GPU alone": (RUN, f"{RUN}        if ids.is_cuda:\n            ids = ids + 1\n", "model.py", "no run reaches"),
    "more rows": (RUN, f"{RUN}        if ids.size(0) > 99:\n            ids = ids + 1\n", "model.py", "no run reaches"),
    "heads in another order": (".transpose(1, 2).flatten(2)", ".permute(0, 2, 3, 1).flatten(2)", "model.py",
                               "on one process"),
    "evaluation": ("dtype))\n", "dtype)).eval()\n", "model.py", "model.training is False"),
    "another file": ('name("weights', 'name("others', "model.py", "others.safetensors"),
    "clipped apart": ("power = torch.stack(powers).amax() if is_max else torch.stack(powers).sum()",
                      "power = torch.stack(powers).amax()", "training.py", "norm of gradients"),
    "sums that stay": ("self.mesh.sums.drop()", "pass", "runtime.py", "no run reaches"),
    "ranks of data": ("rank = rank * axis.size + axis.rank", "rank = rank + axis.rank", "runtime.py", "no run reaches"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_edit_that_is_wrong_elsewhere_is_refused(name: str) -> None:
    before, after, file, said = WRONG[name]
    with pytest.raises(VerificationError, match=said):
        check_edit((before, after), name=file)


SCRIPT = """def count(m: nn.Module) -> int:
    return len([*m.parameters()])


if __name__ == "__main__":
    print(count(build()))


"""
RIGHT = (
    ("import torch\n", "import torch  # mine\n"),
    ("def build(", f"{SCRIPT}def build("),
    (RUN, f"{RUN}        if ids.dim() != 2:\n            print(ids.shape)\n            raise ValueError(ids.shape)\n"),
    ("F.softmax(y, dim=-1)", "y.softmax(-1)"),
)


def test_edits_that_change_nothing_are_taken() -> None:
    check_edit(*RIGHT)
