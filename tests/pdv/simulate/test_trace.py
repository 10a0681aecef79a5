"""Chrome traces: their structure, and that they show the step that was simulated."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from pdv.memory import step_memory
from pdv.simulate import trace as drawing
from pdv.simulate.step import simulate
from tests.pdv.simulate.workloads import gpt

SPECS = (
    "tp=2,dp=4,micro_batch=2,batch=16,activations=1,gradients=1",
    "tp=2,pp=2,dp=2,micro_batch=1,batch=8,vp=2,schedule=interleaved",
)


def traced(spec: str, *, memory: bool = False) -> tuple[float, list[dict[str, Any]]]:
    workload = gpt(spec)
    simulation = simulate(workload, draws=0)
    content = drawing.trace(simulation, step_memory(workload) if memory else None)
    found = json.loads(json.dumps(content))
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    return simulation.step_s, found["traceEvents"]


@pytest.mark.parametrize("spec", SPECS)
def test_events_have_what_the_format_asks(spec: str) -> None:
    step_s, events = traced(spec)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    complete = [e for e in events if e["ph"] == "X"]
    assert complete
    for event in complete:
        assert event["name"]
        assert event["pid"] in processes
        assert (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0
        assert event["dur"] > 0
    last = max(event["ts"] + event["dur"] for event in complete)
    assert 0.5 * step_s * 1e6 < last <= step_s * 1e6 * (1 + 1e-9)  # the host's part outside the graph is not drawn


@pytest.mark.parametrize("spec", SPECS)
def test_what_one_stream_does_does_not_overlap(spec: str) -> None:
    _, events = traced(spec)
    streams: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            streams[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (_, thread), spans in streams.items():
        if thread < drawing.SEND_THREAD:  # sends forward and backward share a thread
            spans.sort()
            assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


def test_collectives_tell_bytes_and_algorithm() -> None:
    _, events = traced(SPECS[0])
    sums = [e for e in events if e["name"] == "all_reduce"]
    assert sums
    assert all(e["args"]["bytes"] > 0 and e["args"]["algorithm"] in ("ring", "doubling", "tree") for e in sums)
    assert {e["args"]["source"] for e in events if e["name"] == "linear"} == {"analytic"}


def test_sends_are_arrows() -> None:
    _, events = traced(SPECS[1])
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert starts
    for number, start in starts.items():
        assert ends[number]["ts"] > start["ts"]
        assert ends[number]["pid"] != start["pid"]
        assert ends[number]["bp"] == "e"


def test_long_pipelines_are_drawn_pass_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s, every = traced(SPECS[1])
    monkeypatch.setattr(drawing, "MOST", 0)
    same_s, events = traced(SPECS[1])
    assert same_s == step_s
    assert len(events) < len(every)
    assert sum(e["name"].startswith("forward") for e in events) == 4 * 4  # chunks, micro-batches


@pytest.mark.parametrize("spec", SPECS)
def test_memory_is_a_counter(spec: str) -> None:
    _, events = traced(spec, memory=True)
    counters = [e for e in events if e["ph"] == "C"]
    assert counters
    assert all(e["args"]["bytes"] > 0 for e in counters)
    assert {e["pid"] for e in counters} == {e["pid"] for e in events if e["ph"] == "X"}
