"""Packages whose plan, source graph or weights say something else. Entry points: ``make_packages``, ``plan_case``,
``graph_case``, ``weights_case``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import shutil
from collections.abc import Mapping
from typing import Any

from onnx import helper

from benchmarks.fuzz_runs.case import Case, flipped
from benchmarks.fuzz_runs.onnx_bombs import X, Y
from benchmarks.fuzz_runs.onnx_files import TWO, plan_command
from benchmarks.fuzz_runs.onnx_models import MODELS, OPTIONS, model, stored
from benchmarks.fuzz_runs.run import Runner
from benchmarks.fuzz_runs.values import altered, deep
from ir.errors import PdvError
from ir.text import parse_graph
from pdv.plan.seal import checksum

Files = dict[str, bytes]
FOLDER = "two_pdv"
ARCH = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=16"
COMMANDS = (["verify"], ["verify"], ["verify"], ["explain"], ["simulate"], ["verify", "--json"], ["launch"])


def make_packages(runner: Runner) -> dict[str, Files]:
    """Packages of small models, by name: for training, for inference, of two stages, and a plan without a program."""
    models = {
        "trained": (MODELS["mlp"](), ()),
        "inferred": (MODELS["attention"](), ("--mode", "infer", *OPTIONS["attention"])),
        "staged": (_layers(), ("--stages", "2", "--micro-batches", "2")),
    }
    found = {}
    for name, (proto, options) in models.items():
        data = proto.SerializeToString()
        found[name] = _made(runner, Case("base", name, {"c.yaml": TWO, "m.onnx": data}, plan_command(*options)))
    words = ["optimize", "--arch", ARCH, "--batch", "4", "-c", "../in/c.yaml", "-o", "out_pdv", "--no-cache"]
    found["described"] = _made(runner, Case("base", "described", {"c.yaml": TWO}, words))
    return found


def _layers() -> Any:  # Any: a model
    """Four products of weights of their own."""
    nodes, x = [], "x"
    for i in range(4):
        y = "y" if i == 3 else f"r{i}"
        nodes += [helper.make_node("MatMul", [x, f"w{i}"], [f"h{i}"]), helper.make_node("Relu", [f"h{i}"], [y])]
        x = y
    return model(nodes, [X], [Y], [stored(f"w{i}", 8, 8) for i in range(4)])


def _made(runner: Runner, case: Case) -> Files:
    """The package that a command writes."""
    result = runner(case, keep=True)
    folder = runner.root / str(runner.number)
    assert result.outcome == "answer", f"{case.what}: {result.outcome}: {result.said}"
    package = folder / "work" / "out_pdv"
    files = {path.name: path.read_bytes() for path in package.iterdir() if path.is_file()}
    shutil.rmtree(folder)
    return files


def _case(kind: str, what: str, files: Mapping[str, bytes], command: list[str]) -> Case:
    placed = {f"{FOLDER}/{name}": data for name, data in files.items()}
    return Case(kind, what, placed, [command[0], f"../in/{FOLDER}", *command[1:]])


def plan_case(packages: Mapping[str, Files], rng: random.Random) -> Case:
    """plan.json altered, with a checksum that fits, or its bytes."""
    name = rng.choice(list(packages))
    files, command = dict(packages[name]), list(rng.choice(COMMANDS))
    if rng.random() < 0.15:
        what, files["plan.json"] = flipped(files["plan.json"], rng)
        return _case("plan bytes", f"{name}: {what}", files, command)
    document = json.loads(files["plan.json"])
    said = []
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        part = rng.choice(["", "", "derivation", "search", "cluster", "mesh", "laws", "sizes", "weights", "files"])
        what, changed = altered(document.get(part, document), rng)
        document = {**document, part: changed} if part in document else changed
        said.append(f"{part} {what}".strip())
        if not isinstance(document, dict):
            break
    if rng.random() < 0.02:
        document = {**document, "sizes": deep(100_000)} if isinstance(document, dict) else deep(50)
    files["plan.json"] = sealed(document)
    return _case("plan", f"{name}: {'; '.join(said)}", files, command)


def sealed(document: Any) -> bytes:  # Any: JSON
    """With a checksum that fits, where there can be one."""
    if isinstance(document, dict):
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            document = {**document, "checksum": checksum(document)}
    try:
        return json.dumps(document).encode("utf-8", "backslashreplace")
    except RecursionError:
        return b"[" * 100_000 + b"]" * 100_000


def graph_case(packages: Mapping[str, Files], rng: random.Random) -> Case:
    """source.graph with a line, a number or a word changed, and plan.json's digests of it made to fit."""
    name = rng.choice(list(packages))
    files, command = dict(packages[name]), list(rng.choice(COMMANDS))
    text = files["source.graph"].decode()
    said = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        what, text = _edited(text, rng)
        said.append(what)
    files["source.graph"] = data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        files["source.graph"] = data = flipped(data, rng)[1]
    document = json.loads(files["plan.json"])
    document["files"]["source.graph"] = hashlib.sha256(data).hexdigest()
    try:
        document["source"]["hash"] = parse_graph(text).digest
    except (PdvError, ArithmeticError, AttributeError, ValueError, LookupError, RecursionError, MemoryError):
        said.append("no graph")
    files["plan.json"] = sealed(document)
    return _case("source graph", f"{name}: {'; '.join(said)}", files, command)


def _edited(text: str, rng: random.Random) -> tuple[str, str]:
    lines = text.split("\n")
    place = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            return "a line left out", "\n".join(lines[:place] + lines[place + 1 :])
        case 1:
            return "a line twice", "\n".join([*lines[: place + 1], *lines[place:]])
        case 2:
            other = rng.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
            return "two lines exchanged", "\n".join(lines)
        case 3:
            lines[place] = re.sub(r"\w+(?==)", rng.choice(["dim", "name", "x", "shape"]), lines[place], count=1)
            return "an attribute renamed", "\n".join(lines)
        case 4:
            lines.insert(
                place,
                "%9" + rng.choice(["", "9" * 30]) + " = relu(%0" + ", %0" * rng.choice([0, 1, 2_000]) + ") : f32[4,8]",
            )
            return "a line put in", "\n".join(lines)
        case 5:
            words = sorted(set(re.findall(r"[a-z_]{3,}", text)))
            old, new = rng.choice(words), rng.choice([*words, "softmax", "matmul", "sum", "nothing"])
            return f"{old} is {new}", re.sub(rf"\b{old}\b", new, text, count=rng.choice([0, 1]))
    numbers = list(re.finditer(r"-?\d+(?:\.\d+)?", text))
    found = rng.choice(numbers)
    new = rng.choice(["0", "-1", "1", "2", "3", "9" * 25, "1e400", "nan", "inf", "True", "''", "(" * 300, str(1 << 40)])
    return f"{found[0]} is {new[:20]}", text[: found.start()] + new + text[found.end() :]


def weights_case(packages: Mapping[str, Files], rng: random.Random) -> Case:
    """weights.safetensors cut off, with another header, or other tensors."""
    name = rng.choice([name for name, files in packages.items() if "weights.safetensors" in files])
    files = dict(packages[name])
    what, files["weights.safetensors"] = changed_tensors(files["weights.safetensors"], rng)
    options = rng.choice([[], ["--allow-edits"], ["--allow-edits", "--run"]])
    return _case("weights", f"{name}: {what}", files, ["verify", *options])


def changed_tensors(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A safetensors file with something wrong."""
    length = int.from_bytes(data[:8], "little")
    match rng.randrange(6):
        case 0:
            return flipped(data, rng)
        case 1:
            long = rng.choice([0, 1, length - 1, length + 1, 1 << 20, 1 << 40, (1 << 64) - 1])
            return f"a header of {long} bytes", long.to_bytes(8, "little") + data[8:]
        case 2:
            return "a pickle", b"\x80\x04\x95" + data
    header = json.loads(data[8 : 8 + length])
    what, header = altered(header, rng)
    text = json.dumps(header).encode("utf-8", "backslashreplace")
    return f"header: {what}", len(text).to_bytes(8, "little") + text + data[8 + length :]
