"""Whatever a cluster file says, it is a cluster or one `ClusterError`."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ir.errors import ClusterError
from pdv.cluster import load_cluster
from pdv.cluster.loader import build_cluster
from pdv.cluster.source import Source, parse_yaml

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "clusters").glob("*.yaml"))
TEXTS = [path.read_text() for path in EXAMPLES]

KEYS = st.sampled_from(
    ["name", "nodes", "network", "mesh", "count", "devices", "device", "link", "preset", "kind", "memory", "peak",
     "memory_bandwidth", "launch_latency", "efficiency", "bandwidth", "latency", "ports_per_node", "float32", "x",
     "ports", "parts", "links",
     "between", "switches", "oversubscription", "rails"]
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 20), st.floats(), st.text(max_size=5),
    st.sampled_from(["t4", "pcie3", "ib-hdr", "cpu-core", "gpu", "16 GiB", "10 GB/s", "3 us", "10 TFLOP/s", "dgx-a100",
                     "n0.g0", "n*.g1", "n1.g9", "hub"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)


WHOLE: dict[str, object] = {
    "nodes": [
        {
            "count": 4,
            "devices": 4,
            "device": {"preset": "t4", "memory": "16 GiB", "peak": {"float32": "10 TFLOP/s"}, "efficiency": 0.5},
            "link": {"preset": "pcie3", "bandwidth": "10 GB/s", "ports": 1},
            "parts": [{"name": "pair", "devices": 2, "link": "pcie3"}],
        }
    ],
    "network": {
        "preset": "ib-hdr", "latency": "3 us", "ports_per_node": 1, "rails": False,
        "switches": [{"nodes": 2, "oversubscription": 2.0}],
    },
    "links": [{"between": ["n*.g0", "n*.g1"], "link": {"preset": "pcie3", "latency": "2 us"}}],
    "mesh": {"x": 4, "y": 4},
}  # fmt: skip
PLACES = [
    ("nodes",), ("nodes", 0), ("nodes", 0, "count"), ("nodes", 0, "devices"), ("nodes", 0, "device"),
    ("nodes", 0, "device", "preset"), ("nodes", 0, "device", "memory"), ("nodes", 0, "device", "peak"),
    ("nodes", 0, "device", "peak", "float32"), ("nodes", 0, "device", "efficiency"), ("nodes", 0, "device", "kind"),
    ("nodes", 0, "link"), ("nodes", 0, "link", "preset"), ("nodes", 0, "link", "bandwidth"), ("network",),
    ("network", "preset"), ("network", "ports_per_node"), ("network", "rails"), ("network", "switches"),
    ("network", "switches", 0), ("network", "switches", 0, "nodes"), ("network", "switches", 0, "oversubscription"),
    ("nodes", 0, "parts"), ("nodes", 0, "parts", 0), ("nodes", 0, "parts", 0, "devices"),
    ("nodes", 0, "parts", 0, "link"),
    ("nodes", 0, "link", "ports"), ("links",), ("links", 0), ("links", 0, "between"), ("links", 0, "between", 1),
    ("links", 0, "link"), ("mesh",), ("mesh", "x"), ("name",),
]  # fmt: skip


def outcome(source: Source) -> str:
    """The error's message, or nothing."""
    try:
        build_cluster(source, "cluster")
    except ClusterError as error:
        return str(error)
    return ""


def check(text: str) -> None:
    try:
        message = outcome(parse_yaml(text, "cluster.yaml"))
    except ClusterError as error:
        message = str(error)
    check_message(message)


def check_message(message: str) -> None:
    assert message == "" or message.isprintable()
    assert len(message) < 1000


@given(VALUES)
def test_any_values(value: object) -> None:
    check(json.dumps(value))


@given(st.dictionaries(KEYS, VALUES))
def test_any_mapping_from_python(value: dict[str, object]) -> None:
    check_message(outcome(Source("cluster", value, {})))


def test_the_whole_is_right() -> None:
    assert load_cluster(WHOLE).num_devices == 16


@settings(max_examples=300)
@given(st.sampled_from(PLACES), VALUES)
def test_one_wrong_value(place: tuple[str | int, ...], value: object) -> None:
    data = deepcopy(WHOLE)
    inner: Any = data  # walked down by keys and positions
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    check_message(outcome(Source("cluster", data, {})))


@settings(max_examples=200)
@given(st.data())
def test_damaged_examples(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 20)))
    check(text[:start] + data.draw(st.text(max_size=8)) + text[stop:])


@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    check(text)
