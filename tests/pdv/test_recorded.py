"""Plans, proofs, prices and packages are what was recorded of them: `pytest --update-golden` records them anew.

What is reviewed as prose is kept in full, the rest as digests: `tests/golden/emitted/NAME.py.txt` and `NAME.txt`. The
larger cases are those of `python benchmarks/golden.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pdv
from benchmarks.golden import digest, digests, texts
from pdv.emit import templates
from pdv.emit.emission import module_texts
from pdv.page import REPORT
from pdv.plan.seal import FORMAT_MINOR, FORMAT_VERSION
from tests.conftest import GOLDEN, Golden
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster
from tests.test_docs import ROOT

if TYPE_CHECKING:
    from pdv.plan.package import Plan

COPIED = {"__init__.py", *(path.name for path in Path(templates.__file__).parent.rglob("[a-z]*.py"))}
"""Files that are the same in every package that has them."""


@dataclass(frozen=True)
class Case:
    """A model of ``tests.pdv.miniatures`` and what it is planned for.

    Attributes:
        model: its class.
        inputs: shapes; of indices where the model is one of words.
        techniques: what each axis must do; axes without are free.
        options: further arguments of ``pdv.optimize``.
        latency: of the links; slow to start, they favour few collectives.
        efficiency: of the devices; where compute is slow, whatever cuts it is worth its collectives.
        stages, micro_batches: where the model runs as a pipeline, of stages on that mesh each.
    """

    model: str
    inputs: tuple[tuple[int, ...], ...]
    mesh: Mapping[str, int]
    techniques: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    latency: str = "1 us"
    efficiency: float = 1.0
    stages: int = 1
    micro_batches: int = 1


WORDS = ((8, 8),)
# written out in full: one for each way to shard that people know by name
FULL = {
    "tensor": Case("Gpt", WORDS, {"tp": 4}, {"tp": "tensor"}, latency="20 us"),
    "sequence": Case("Gpt", WORDS, {"tp": 4}, {"tp": "tensor+sequence"}, efficiency=0.02),
    "zero-3": Case("Gpt", WORDS, {"dp": 4}, {"dp": "zero-3"}),
    "hybrid": Case(
        "Llama", WORDS, {"dp": 4, "tp": 2}, {"dp": "ddp", "tp": "tensor"}, {"rules": "none"}, efficiency=0.02
    ),
    "convolutions": Case("Convolutions", ((8, 4, 8, 8),), {"dp": 4}, {"dp": "ddp"}),
    "pipeline": Case("Gpt", WORDS, {"dp": 2}, stages=2, micro_batches=4),
    "inference": Case("Convolutions", ((8, 4, 8, 8),), {"tp": 2}, {"tp": "tensor"}, {"mode": "infer"}),
}
DIGESTED = {
    "free": Case("Gpt", WORDS, {"x": 2, "y": 2}),
    "hybrid-rewritten": Case("Llama", WORDS, {"dp": 4, "tp": 2}, {"dp": "ddp", "tp": "tensor"}),
    "llama-bfloat16": Case("Llama", WORDS, {"x": 4}, {}, {"dtype": "bfloat16"}),
    "bert": Case("Bert", (*WORDS, *WORDS), {"dp": 4}, {"dp": "zero-2"}),
    "context": Case("Bert", (*WORDS, *WORDS), {"cp": 2}, {"cp": "context"}),
    "experts": Case("Mixture", ((16, 16),), {"ep": 4}, {"ep": "expert"}),
    "tables": Case("Recommender", ((8, 8), (8, 3, 2)), {"x": 2, "y": 2}),
    "convolutions-free": Case("Convolutions", ((8, 4, 8, 8),), {"x": 2, "y": 4}),
    "towers": Case("Towers", ((16, 16),), {"x": 4}, {}, {"mode": "infer"}),
}


def planned(case: Case) -> Plan:
    """The plan of a case."""
    import torch

    from tests.pdv import miniatures

    module = miniatures.settled(getattr(miniatures, case.model)())
    words = [len(shape) == 3 or case.model in ("Gpt", "Llama", "Bert") for shape in case.inputs]
    inputs = tuple(
        miniatures.ids(*shape) if word else torch.zeros(shape) for shape, word in zip(case.inputs, words, strict=True)
    )
    devices = cluster(case.stages * math.prod(case.mesh.values()))
    node = devices["nodes"][0]
    node["device"] |= {"efficiency": case.efficiency}
    node["link"] |= {"latency": case.latency}
    pins = {"mesh": dict(case.mesh), "techniques": dict(case.techniques)} if case.techniques else None
    module.train(case.options.get("mode") != "infer")
    if case.stages > 1:
        return plan_pipeline(
            module, inputs, devices, stages=case.stages, micro_batches=case.micro_batches, mesh=case.mesh
        )
    return pdv.optimize(module, inputs, cluster=devices, mesh=case.mesh, pins=pins, **case.options)


def record(plan: Plan, folder: Path) -> str:
    """What a saved plan is, line by line: what it takes, what is proved of it, and digests of all that is written."""
    document = plan.document
    lines = [
        f"step       {document['predicted']['step_time_s']['mean']!r} s",
        f"simulated  {document['simulated']['step_s']!r} s",
        *(f"{axis:<10} {', '.join(names) or '-'}" for axis, names in document["techniques"].items()),
        f"search     {document['search']['certificate']['statement']}",
        f"proof      {document['proof']['statement']}",
        f"run        {document['run']['statement']}",
        "",
    ]
    saved = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    lines += [f"plan.json {name:<21}{value}" for name, value in digests(saved).items()]
    for path in sorted(folder.iterdir()):
        if path.name not in COPIED and path.name not in ("plan.json", REPORT):  # the page is drawn of plan.json
            lines.append(f"{path.name:<31}{digest(path.read_bytes())}")
    return "\n".join(lines) + "\n"


BY_NAME = (
    ".techniques", ".splits", ".memory_bytes", ".peak_bytes", ".breakdown_s", ".sources", ".sizes", ".weights",
    ".files", ".cluster.mesh", ".state.names", ".memory_breakdown_bytes", ".peak_flops",
)  # fmt: skip
"""Fields of plan.json whose keys are names of axes, devices, tensors and the like."""


def fields(value: Any, path: str = "") -> Iterator[str]:
    """The fields of a document, without what they hold."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            at = f"{path}.*" if path.endswith(BY_NAME) else f"{path}.{name}"
            yield at
            yield from fields(entry, at)
    elif isinstance(value, list):
        for entry in value:
            yield from fields(entry, path)


def check_format(name: str, saved: Mapping[str, Any], golden: Golden) -> None:
    """No field comes or goes without a version: a new one that readers may leave aside raises ``FORMAT_MINOR``."""
    head = f"format {FORMAT_VERSION}.{FORMAT_MINOR}"
    listed = sorted({field.removeprefix(".") for field in fields(saved)})
    known = GOLDEN / "plans" / f"format-{name}.txt"
    before = known.read_text(encoding="utf-8").splitlines() if known.exists() else [""]
    changed = sorted(set(listed) ^ set(before[1:]))
    assert not changed or before[0] != head, f"pdv/plan/seal.py: raise the version of the format for {changed}"
    golden(f"plans/format-{name}.txt", "\n".join([head, *listed]) + "\n")
    page = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE))))
    assert set(saved) <= rows, "docs/plan-format.md says what each field means"
    assert page.startswith(f"# plan.json, {head}\n")


@pytest.mark.parametrize("name", [*FULL, *DIGESTED])
def test_a_plan_is_what_was_recorded(name: str, golden: Golden, tmp_path: Path) -> None:
    plan = planned((FULL | DIGESTED)[name])
    folder = plan.save(tmp_path / name)
    if name in FULL:
        model = (folder / "model.py").read_text(encoding="utf-8")
        golden(f"emitted/{name}.py.txt", model)
        assert texts(plan)["model.py"] == model, "benchmarks/golden.py digests what is written"
    golden(f"emitted/{name}.txt", record(plan, folder))
    if name in ("zero-3", "pipeline"):
        check_format(name, json.loads((folder / "plan.json").read_text(encoding="utf-8")), golden)


WHERE_READ = "float8", "gathers", "operators", "pipeline", "slices"


def test_what_every_package_holds_is_what_was_recorded(golden: Golden) -> None:
    files = module_texts("".join(f"from .{name} import every_one\n" for name in WHERE_READ))
    golden("emitted/copied.txt", "".join(f"{name:<31}{digest(files[name])}\n" for name in sorted(COPIED)))
