"""Files that say what to plan for: clusters, pins, laws, device records, topologies. Entry points: the ``_case``s."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from benchmarks.fuzz_runs.case import Case, Link, Pipe, flipped
from benchmarks.fuzz_runs.onnx_files import TWO, plan_command
from benchmarks.fuzz_runs.onnx_models import MODELS
from benchmarks.fuzz_runs.packages import ARCH
from benchmarks.fuzz_runs.values import altered
from benchmarks.record import ROOT

PLAN = ["optimize", "--arch", ARCH, "--batch", "16", "--budget", "1s", "--no-cache", "-c"]
WHOLE: dict[str, Any] = {
    "name": "two kinds",
    "nodes": [
        {
            "count": 2,
            "devices": 4,
            "device": {
                "preset": "t4",
                "memory": "16 GiB",
                "peak": {"float32": "10 TFLOP/s"},
                "efficiency": 0.5,
                "launch_latency": "4 us",
                "memory_bandwidth": "300 GB/s",
                "kind": "gpu",
            },
            "link": {"preset": "pcie3", "bandwidth": "10 GB/s", "latency": "3 us", "ports": 1},
            "parts": [{"name": "pair", "devices": 2, "link": "pcie3"}],
        },
    ],
    "network": {
        "preset": "ib-hdr",
        "latency": "3 us",
        "ports_per_node": 1,
        "rails": False,
        "switches": [{"nodes": 2, "oversubscription": 2.0}],
    },
    "links": [{"between": ["n*.g0", "n*.g1"], "link": {"preset": "pcie3", "latency": "2 us"}}],
    "mesh": {"x": 2, "y": 4},
}
PINS = {
    "mesh": {"a": 2},
    "tensors": {"wte": {"a": 0}, "*": {"a": "whole"}},
    "operators": [{"name": "*", "kind": "linear", "axis": "a", "loop": "n"}],
    "axes": {"a": "data"},
    "techniques": {"a": "data"},
    "forbid": [{"axis": "a", "loop": "k"}],
}
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (98 + i, 98 + i, *[97 + i] * 9) for i in range(9)
)
TEXTS: dict[str, bytes | Link | Pipe] = {
    "a bomb of aliases": BOMB,
    "a circle of aliases": b"&a [*a]",
    "nothing": b"",
    "a byte order mark": b"\xff\xfe" + TWO,
    "no text": bytes(range(256)),
    "a tag": b"!!python/object/apply:os.mkdir ['pwned']",
    "a pipe": Pipe(),
    "a device": Link("/dev/zero"),
    "a circle of links": Link("c.yaml"),
    "a folder": Link("."),
    "outside": Link("/etc/passwd"),
    "lists in lists": b"[" * 100_000,
    "mappings in mappings": b"{a: " * 3_000,
    "a long line": b"x" * (2 << 20),
    "a long key": b"? " + b"k" * 5_000 + b"\n: 1",
    "a merge": b"<<: {nodes: []}\nnodes: []",
    "several documents": TWO + b"---\n" + TWO,
    "a number of a million digits": b"nodes: " + b"9" * 1_000_000,
    "a date": b"nodes: 2026-13-45",
    "a key twice": TWO + TWO,
    "a number in base sixty": b"nodes: [{devices: 1:30, device: cpu-core}]",
    "octal": b"nodes: [{devices: 0o17, device: cpu-core}]",
    "many nodes": b"nodes:\n" + b"  - {devices: 1, device: cpu-core}\n" * 20_000,
    "a billion devices": b"nodes: [{count: 1000000000, devices: 8, device: t4, link: pcie3}]\nnetwork: ib-hdr\n",
    "a million devices": b"nodes: [{count: 125000, devices: 8, device: t4, link: pcie3}]\nnetwork: ib-hdr\n",
    "a prime of devices": b"nodes: [{count: 7919, devices: 1, device: t4}]\nnetwork: ib-hdr\n",
}


def cluster_case(rng: random.Random) -> Case:
    """A cluster file: its text, or a value in it."""
    if rng.random() < 0.5:
        what, changed = altered(WHOLE, rng)
        for _ in range(rng.choice([0, 0, 1, 2])):
            more, changed = altered(changed, rng)
            what += f"; {more}"
        data = _as_yaml(changed)
    else:
        name = rng.choice(examples())
        what, data = flipped((ROOT / "examples/clusters" / name).read_bytes(), rng)
        what = f"{name}: {what}"
    return Case("cluster", what, {"c.yaml": data}, _cluster_command(rng))


def hostile_clusters() -> Iterator[Case]:
    """Texts made to hurt: as clusters, as pins and as device records."""
    for what, content in TEXTS.items():
        for command in (
            ["cluster", "show", "../in/c.yaml"],
            ["cluster", "validate", "../in/c.yaml"],
            [*PLAN, "../in/c.yaml"],
        ):
            yield Case("cluster hostile", what, {"c.yaml": content}, command)
        pinned = [*PLAN, "../in/good.yaml", "--pins", "../in/c.yaml"]
        yield Case("pins hostile", what, {"c.yaml": content, "good.yaml": TWO}, pinned)
        record = Link("../c.yaml") if not isinstance(content, Link) else content
        files = {"c.yaml": content, "devices/mine.yaml": record}
        yield Case("device hostile", what, files, _device_command())


def _cluster_command(rng: random.Random) -> list[str]:
    command = rng.choice([["cluster", "show"], ["cluster", "validate"], ["cluster", "show", "--json"], PLAN])
    return [*command, "../in/c.yaml"]


def _as_yaml(value: Any) -> bytes:
    """As JSON, which is YAML."""
    return json.dumps(value).encode("utf-8", "backslashreplace")


@cache
def examples() -> list[str]:
    """The clusters that come with the repository."""
    return sorted(path.name for path in (ROOT / "examples/clusters").glob("*.yaml"))


def pins_case(rng: random.Random) -> Case:
    """A pins file."""
    what, changed = altered(PINS if rng.random() < 0.8 else dict(rng.sample(list(PINS.items()), 2)), rng)
    data = _as_yaml(changed)
    if rng.random() < 0.2:
        more, data = flipped(data, rng)
        what += f"; {more}"
    return Case("pins", what, {"c.yaml": TWO, "p.yaml": data}, [*PLAN, "../in/c.yaml", "--pins", "../in/p.yaml"])


def _device_command() -> list[str]:
    """Reads the records, then finds no measurements."""
    return ["cost", "evaluate", "--data", "../in/devices", "--devices", "../in/devices"]


def device_case(rng: random.Random) -> Case:
    """A device record."""
    records = sorted((ROOT / "learned_cost/devices").glob("*.yaml"))
    path = rng.choice(records)
    record = yaml.safe_load(path.read_bytes())
    if rng.random() < 0.3:
        what, data = flipped(path.read_bytes(), rng)
    else:
        what, changed = altered(record, rng)
        data = _as_yaml(changed)
    return Case("device", f"{path.stem}: {what}", {"devices/mine.yaml": data}, _device_command())


def laws_case(rng: random.Random) -> Case:
    """A file of laws."""
    lines = (ROOT / "pdv/rewrite/library/written.laws").read_text(encoding="utf-8").splitlines()
    laws = [line for line in lines if "==" in line]
    text = "\n".join(rng.sample(laws, min(3, len(laws)))) + "\n"
    if rng.random() < 0.5:
        what, data = flipped(text.encode(), rng)
    else:
        words = text.split(" ")
        place, word = (
            rng.randrange(len(words)),
            rng.choice(["==", "linear(", "x", "for", "[*s]", "(" * 5_000, "9" * 400, "-1", "="]),
        )
        what, data = (
            f"{words[place]!r} is {word[:20]!r}",
            " ".join([*words[:place], word, *words[place + 1 :]]).encode(),
        )
    command = rng.choice([["rules", "check", "../in/r.laws"], [*PLAN, "../in/c.yaml", "--rules", "../in/r.laws"]])
    return Case("laws", what[:120], {"c.yaml": TWO, "r.laws": data}, command)


def topology_case(rng: random.Random) -> Case:
    """What another tool says of a machine."""
    inputs = sorted((ROOT / "tests/pdv/cluster/inputs").iterdir())
    path = rng.choice(inputs)
    what, data = flipped(path.read_bytes(), rng)
    if rng.random() < 0.1:
        entities = b"".join(b'<!ENTITY e%d "%s">' % (i, b"&e%d;" % (i - 1) * 10 if i else b"x") for i in range(9))
        what, data = "a bomb of entities", b"<!DOCTYPE s [" + entities + b"]><system>&e8;</system>"
    command = ["cluster", "detect", "--from", f"../in/{path.name}", "-o", "out.yaml"]
    return Case("topology", f"{path.name}: {what}", {path.name: data}, command)


def disk_case(rng: random.Random) -> Case:
    """A right model on a disk that is nearly full: whatever is written may not have room."""
    files = {"m.onnx": MODELS[rng.choice(["mlp", "conv", "shapes"])]().SerializeToString(), "c.yaml": TWO, **_host()}
    command = rng.choice(
        [
            plan_command(),
            plan_command("--json"),
            [*PLAN, "../in/c.yaml", "-o", "out_pdv"],
            ["cluster", "detect", "--from", f"../in/{next(iter(_host()))}", "-o", "out.yaml"],
            ["cluster", "devices"],
            [
                "simulate",
                "../in/m.onnx",
                "--manual",
                "dp=2,batch=4",
                "-c",
                "../in/c.yaml",
                "--dtype",
                "float32",
                "--trace",
                "out.json",
            ],
        ]
    )
    room = rng.choice([1 << 12, 1 << 12, 6_000, 10_000, 20_000, 50_000])
    return Case("disk", f"{room} bytes of room", files, command, room)


def _host() -> dict[str, bytes]:
    path = ROOT / "tests/pdv/cluster/inputs/dgx-a100.topo"
    return {path.name: path.read_bytes()}
