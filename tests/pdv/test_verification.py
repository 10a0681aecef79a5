"""A package is what its plan says, or is refused by the name of the file: attacked by edits and flipped bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ir.errors import UsageError, VerificationError
from pdv.emit.emission import BESIDE
from pdv.page import REPORT
from pdv.plan.package import Plan
from pdv.plan.source import file_digest
from pdv.verification import verify
from tests.pdv.packages import Document, change_plan, document_of
from tests.pdv.test_compile import planned

LAW = "grow: gelu(x) == scale(gelu(x), factor=2147483648) for x[*s]"


@cache
def saved(**options: Any) -> Path:
    """A package, written once."""
    import tempfile

    return plan(**options).save(Path(tempfile.mkdtemp()) / "two_pdv")


@cache
def plan(**options: Any) -> Plan:
    return planned(**options)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved(), tmp_path / "two_pdv"))


def test_a_package_verifies(package: Path) -> None:
    told = verify(package)
    names = {path.name for path in package.iterdir()}
    assert {*told["files"], "plan.json", REPORT} == names
    assert told["proof"] == document_of(package)["proof"]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"Python's own")
    (package / "train.log").write_text("what a run leaves")
    assert verify(package) == told


def test_a_plan_without_a_program_verifies_and_has_none(tmp_path: Path) -> None:
    folder = plan().save_plan(tmp_path / "plan")
    assert verify(folder)["files"] == ["source.graph"]
    (folder / "model.py").write_text("import torch\n")
    with pytest.raises(VerificationError, match=r"model\.py is no file of the plan's"):
        verify(folder)


@pytest.mark.parametrize("name", ["model.py", "__init__.py", *(f"{name}.py" for name in BESIDE)])
def test_an_edited_file_is_named_with_its_line(name: str, package: Path) -> None:
    lines = (package / name).read_text(encoding="utf-8").split("\n")
    lines[2] += "  # edited"
    (package / name).write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(
        VerificationError, match=f"{name} is not what the plan is written as, from line 3: '.*# edited'"
    ):
        verify(package)


def test_relu_for_another_function_is_refused(package: Path) -> None:
    text = (package / "model.py").read_text(encoding="utf-8")
    assert "F.relu(" in text
    (package / "model.py").write_text(text.replace("F.relu(", "F.gelu("), encoding="utf-8")
    with pytest.raises(VerificationError, match=r"model\.py is not what the plan is written as"):
        verify(package)


@pytest.mark.parametrize("name", ["model.py", "runtime.py", "weights.safetensors", "source.graph"])
def test_a_missing_file_is_named(name: str, package: Path) -> None:
    (package / name).unlink()
    with pytest.raises(VerificationError, match=name):
        verify(package)


@pytest.mark.parametrize("name", ["extra.py", "model.abi3.so", "model/__init__.py", "deep/er/x.pyc"])
def test_what_python_could_import_besides_is_named(name: str, package: Path) -> None:
    (package / name).parent.mkdir(parents=True, exist_ok=True)
    (package / name).touch()
    with pytest.raises(VerificationError, match=f"{name} is no file of the plan's"):
        verify(package)


def test_a_linked_folder_is_named(package: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (package / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VerificationError, match="model is no file"):
        verify(package)


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "does not hold the tensors"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is longer than its tensors"),
    "shorter": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is another tensor"),
    "another value": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"), "is another tensor"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_other_weights_are_refused(name: str, package: Path) -> None:
    change, message = WEIGHTS[name]
    change(package / "weights.safetensors")
    with pytest.raises(VerificationError, match=rf"weights\.safetensors.*{message}"):
        verify(package)


def at(*path: str | int, value: object) -> Callable[[Document], object]:
    """A change of one place of plan.json."""

    def change(document: Document) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


# edits with a checksum that fits, each with the field that the message names
FIELDS: dict[str, tuple[Callable[[Document], object], str]] = {
    "pcg_hash": (at("pcg_hash", value="0" * 32), "pcg_hash is"),
    "prediction": (at("predicted", "step_time_s", "mean", value=1e-9), r"predicted\.step_time_s\.mean is 1e-09"),
    "memory": (at("predicted", "memory_bytes", "slow", value=1.0), r"predicted\.memory_bytes\.slow"),
    "simulated": (at("simulated", "step_s", value=1e-9), r"simulated\.step_s"),
    "fits": (at("simulated", "fits", value=False), r"simulated\.fits"),
    "proof": (at("proof", "error_bound", value=1e-300), r"proof\.error_bound"),
    "statement": (at("proof", "statement", value="equal, believe me"), r"proof\.statement"),
    "no proof": (lambda document: document.pop("proof"), "proof"),
    "techniques": (at("techniques", "dp", value=["ZeRO-9"]), r"techniques\.dp"),
    "an operator": (at("operators", 0, "sharding", value="I"), r"operators\[0\]\.sharding"),
    "mode": (at("mode", value="infer"), "mode|predicted|operators|pcg_hash"),
    "source name": (at("source", "name", value="other"), r"source\.name"),
    "source parameters": (at("source", "parameters", value=3), r"source\.parameters"),
    "mesh": (at("mesh", 0, "size", value=4), "mesh|derivation"),
    "a faster link": (at("mesh", 0, "link", "bandwidth_bytes_per_s", value=1e15), "mesh|predicted"),
    "a link faster than none": (at("mesh", 0, "link", "latency_s", value=-1e-6), "no link: 'wire'"),
    "a level of no devices": (at("cluster", "nodes", 0, "inside", 0, "size", value=0), "no level: .* of size 0"),
    "more devices in a node": (
        lambda document: document["cluster"]["nodes"][0]["inside"][0].update(size=3), "no nodes: 1 of 2 devices, 3 in"
    ),
    "a class that is not there": (at("cluster", "nodes", 0, "device_class", value=-1), "classes {-1} of 1"),
    "a device that computes nothing": (
        at("cluster", "classes", 0, "device", "peak_flops", "float32", value=-1.0), "no devices: 2 of 'slow'"
    ),
    "a link without a name": (at("mesh", 0, "link", "name", value=None), "the link of dp is not the cluster's"),
    "a faster device": (
        lambda document: document["cluster"]["classes"][0]["device"].update(launch_latency_s=0.0), "predicted|operators"
    ),
    "memory of the cluster": (at("cluster", "memory_bytes", value=1), r"cluster\.memory_bytes"),
    "gap": (at("search", "gap", value=-1.0), r"search\.gap"),
    "cost": (at("search", "cost", value=1e-9), r"search\.(cost|lower_bound)"),
    "a bound above the cost": (at("search", "lower_bound", value=1e9), r"search\.lower_bound"),
    "certificate": (at("search", "certificate", "statement", value="the best"), r"certificate\.statement"),
    "meshes": (at("search", "certificate", "space", "meshes", value=["dp=3"]), r"space\.meshes"),
    "strategy": (at("search", "strategy", value="magic"), r"search\.strategy"),
    "rows": (at("sizes", "b", "fixed_by", value=None), "sizes says what cannot be"),
    "seconds": (at("search", "seconds", value=1.0), r"search\.seconds"),
    "an unknown field": (at("notes", value="hello"), "the field notes is unknown"),
    "an unknown field inside": (at("search", "certificate", "space", "x", value=1), "unknown field"),
    "an unknown field of a step": (at("derivation", 0, "note", value=""), r"derivation\[0\]\.note is unknown"),
    "a kind": (at("derivation", 0, "kind", value="storage"), r"derivation\[0\]\.kind"),
    "bindings": (lambda document: document["derivation"][0]["bindings"].update(x=1), "the bindings of"),
    "no derivation": (at("derivation", value=[]), "plan.json"),
    "weights dropped": (lambda document: document.pop("weights"), "is no file of the plan's"),
    "a tensor dropped": (lambda document: document["weights"].popitem(), "weights are not those of the program"),
    "a tensor's type": (lambda document: next(iter(document["weights"].values())).update(dtype="F16"), "F16"),
    "a tensor's shape": (lambda document: next(iter(document["weights"].values())).update(shape=[1, 1]), "shape"),
    "another cost model": (at("cost_model", "devices", value={"slow": "T4"}), "cost_model"),
    "another file": (at("files", value={"../plan.json": "0"}), "names the files"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_does_not_follow_from_the_plan_is_named(name: str, package: Path) -> None:
    change, message = FIELDS[name]
    change_plan(package, change)
    with pytest.raises(VerificationError, match=message) as caught:
        verify(package)
    assert caught.value.exit_code == 7


def test_an_edit_without_its_checksum_is_refused(package: Path) -> None:
    document = document_of(package)
    document["search"]["states"] += 1
    (package / "plan.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(VerificationError, match="was changed after it was written"):
        verify(package)


def test_a_name_given_twice_is_refused(package: Path) -> None:
    text = (package / "plan.json").read_text(encoding="utf-8")
    (package / "plan.json").write_text('{"mode": "infer",' + text[1:], encoding="utf-8")
    with pytest.raises(VerificationError, match="stands twice"):
        verify(package)


def test_what_is_no_number_is_refused(package: Path) -> None:
    text = (package / "plan.json").read_text(encoding="utf-8")
    for number in ("1e999", "NaN"):
        (package / "plan.json").write_text(text.replace('"seconds": null', f'"seconds": {number}'), encoding="utf-8")
        with pytest.raises(VerificationError, match=r"plan\.json is damaged"):
            verify(package)


def test_a_plan_of_an_older_version_says_so(package: Path) -> None:
    change_plan(package, at("format_version", value=1))
    with pytest.raises(
        VerificationError, match=r"format 1\.[0-9], of an older pdv\. Allowed: 2\.x, which .* Plan again"
    ):
        verify(package)


def test_a_false_law_is_not_believed(package: Path) -> None:
    change_plan(package, at("laws", value=[LAW]))
    with pytest.raises(VerificationError, match=r"plan\.json: law grow is false|laws"):
        verify(package)


def test_another_source_with_its_own_digests_is_another_plan(package: Path) -> None:
    path = package / "source.graph"
    path.write_text(path.read_text(encoding="utf-8").replace("relu(", "gelu("), encoding="utf-8")
    change_plan(package, at("files", "source.graph", value=file_digest(path)))
    with pytest.raises(VerificationError, match="not the graph that was planned"):
        verify(package)


def edited(package: Path, before: str, after: str) -> Path:
    """The package with another text in model.py."""
    text = (package / "model.py").read_text(encoding="utf-8")
    assert before in text
    (package / "model.py").write_text(text.replace(before, after), encoding="utf-8")
    return package


def test_edits_are_run_where_they_are_allowed(package: Path) -> None:
    edited(package, "F.relu(", "torch.relu(")
    (package / "notes.py").write_text("X = 1\n")
    told = verify(package, allow_edits=True)
    assert told["edited"] == ["model.py", "notes.py"]
    assert "within" in told["run"]
    edited(package, "torch.relu(", "F.gelu(")
    with pytest.raises(VerificationError):
        verify(package, allow_edits=True)


def test_a_program_is_run_where_that_is_asked_for(package: Path) -> None:
    assert verify(package)["run"] is None
    assert "simulated ranks" in verify(package, run=True)["run"]
    change_plan(package, at("run", "statement", value="it ran, believe me"))
    assert "what a run of the emitted text showed (--run runs it again)" in verify(package)["claims"]
    with pytest.raises(VerificationError, match=r"run\.statement is 'it ran, believe me'"):
        verify(package, run=True)


def test_trained_weights_are_allowed_and_others_are_not(package: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = package / "weights.safetensors"
    tensors = {name: array + 1 for name, array in load_file(path).items()}
    save_file(tensors, path)
    with pytest.raises(VerificationError, match=r"weights\.safetensors"):
        verify(package)
    assert verify(package, allow_edits=True)["edited"] == []
    name = min(tensors)
    wrong = (
        {other: array for other, array in tensors.items() if other != name},
        {**tensors, name: tensors[name][:1]},
        {**tensors, name: tensors[name].astype("float16")},
        {**tensors, "extra": tensors[name]},
    )
    for others in wrong:
        save_file(others, path)
        with pytest.raises(VerificationError, match=r"weights\.safetensors"):
            verify(package, allow_edits=True)
    for data in (b"", b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}"):
        path.write_bytes(data)
        with pytest.raises(VerificationError, match=r"weights\.safetensors"):
            verify(package, allow_edits=True)


CODE = """
import sys
from pathlib import Path
import pdv
from pdv.frontend.program import Program
from tests.pdv.emit.graphs import random_weights, stack
from tests.pdv.worlds import cluster
graph = stack(3)
plan = pdv.optimize(Program(graph, random_weights(graph)), cluster=cluster(4), mesh={"a": 2, "b": 2})
plan.made_by("pdv optimize two.onnx").save(Path(sys.argv[1]))
"""


def test_emission_is_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", CODE, str(tmp_path / seed)], check=True, env=environment)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes(), path.name
    assert verify(tmp_path / "1")["files"]


def test_a_folder_without_a_plan_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(tmp_path)
