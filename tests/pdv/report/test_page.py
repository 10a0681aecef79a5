"""The page: one file that loads nothing, says what plan.json and the simulation say, and lets no name become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import pdv
from ir.errors import UsageError, VerificationError
from pdv.memory import step_memory
from pdv.page import write_page
from pdv.page.page import LEFT_OUT
from pdv.plan.package import Plan
from pdv.report.html.facts import saved_page, step_of
from pdv.report.loaded import load_plan
from pdv.report.simulated import step_facts
from pdv.simulate.drawing import draw
from pdv.simulate.result import OTHERS
from pdv.simulate.step import simulate
from tests.pdv import miniatures
from tests.pdv.report.pages import data_of, piped, plain, read, sharded
from tests.pdv.simulate.workloads import gpt
from tests.pdv.worlds import cluster

PLANS: dict[str, Callable[[], Plan]] = {
    "sharded": sharded,
    "piped": piped,
    "one device": plain,
    "inference": lambda: plain("infer", 2),
}
LARGEST = 10 * 2**20
ASSETS = Path("pdv/page/assets")


@pytest.fixture(params=PLANS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return PLANS[request.param]().save(tmp_path / "p")


def test_every_package_has_a_page_that_says_what_its_plan_says(folder: Path) -> None:
    page, document = read(folder), json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    told = data_of(page)["plan"]
    drawn = {node.get("number") for section in data_of(page)["graph"] for node in section["nodes"]}
    document["derivation"] = [step for step in document["derivation"] if step["kind"] != "parallel"]
    document["operators"] = [entry for entry in document["operators"] if entry["number"] in drawn]
    assert told == {name: value for name, value in document.items() if name not in LEFT_OUT}
    assert len(page) < LARGEST


def test_a_saved_plan_gives_the_page_that_was_written_with_it(folder: Path) -> None:
    again, written = data_of(saved_page(folder)), data_of(read(folder))
    assert again.keys() == written.keys()
    assert _rounded(again) == _rounded(written)


def _rounded(value: object) -> object:
    """Sums may be taken in another order."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_nodes_take_what_plan_json_says(folder: Path) -> None:
    facts = data_of(read(folder))
    times = {entry["number"]: entry["time_s"] for entry in facts["plan"]["operators"]}
    for section in facts["graph"]:
        for node in section["nodes"]:
            if "number" in node:
                assert node["forward_s"] + node["backward_s"] == pytest.approx(times[node["number"]], abs=1e-15)


def test_equal_blocks_once_hold_every_operator(folder: Path) -> None:
    facts = data_of(read(folder))
    document = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    counted = sum(one["count"] * sum("number" in node for node in one["nodes"]) for one in facts["graph"])
    assert counted == len(document["operators"])
    whole = sum(entry["time_s"] for entry in document["operators"])
    told = sum(
        one["count"] * math.fsum(node["forward_s"] + node["backward_s"] for node in one["nodes"] if "number" in node)
        for one in facts["graph"]
    )
    assert told == pytest.approx(whole)


def test_memory_is_that_of_the_plan(folder: Path) -> None:
    facts = data_of(read(folder))
    fullest: dict[str, float] = defaultdict(float)
    for held in facts["timeline"]["held"]:
        fullest[held["device"]] = max(fullest[held["device"]], held["total_bytes"])
        assert sum(held["by_kind_bytes"].values()) == pytest.approx(held["peak_bytes"])
        assert max(held["curve"][1::4], default=0.0) == pytest.approx(held["peak_bytes"], abs=1)
    assert fullest == pytest.approx(facts["plan"]["predicted"]["memory_bytes"])


def test_tasks_add_up_to_what_the_simulation_booked(folder: Path) -> None:
    """Compute, recomputation and optimizer of the first class of devices of each stage, in picoseconds."""
    step = step_of(load_plan(folder))
    line = data_of(read(folder))["timeline"]
    found: dict[tuple[int, str], int] = defaultdict(int)
    for stage, _, pattern, *_ in line["strips"]:
        numbers = line["patterns"][pattern]
        for kind, device, lane, _, duration in zip(*(numbers[i::5] for i in range(5)), strict=True):
            if device == 0 and lane == 0:
                found[stage, line["kinds"][kind]["part"]] += duration
    for stage, classes in enumerate(step.simulation.ran.parts):
        for part in ("compute", "recomputation", "optimizer"):
            assert found[stage, part] == classes[0].get(part, 0)


def test_traffic_is_all_that_is_communicated(folder: Path) -> None:
    step, told = step_of(load_plan(folder)), data_of(read(folder))["traffic"]
    parts = [dict(classes[0]) for classes in step.simulation.ran.parts]
    names = {name for own in parts for name, time in own.items() if time and name not in (*OTHERS, "pipeline")}
    assert names == set(told) - {"pipeline"}
    for name in names:
        assert told[name]["busy_ps"] > 0
        assert name == "tied" or told[name]["bytes"] > 0  # of sums between stages nobody says the bytes
    assert ("pipeline" in told) == (len(parts) > 1)


def test_traffic_of_data_parallelism_is_the_gradients() -> None:
    module = miniatures.settled(miniatures.Gpt())
    pins = {"mesh": {"dp": 2}, "techniques": {"dp": "ddp"}}
    plan = pdv.optimize(module, (miniatures.ids(8, 8),), cluster=cluster(2), mesh=pins["mesh"], pins=pins)
    assert plan.drawn is not None
    assert plan.drawn["traffic"]["dp"]["bytes"] == pytest.approx(4 * plan.document["source"]["parameters"])


def test_every_collective_says_what_it_moves() -> None:
    for spec in ("tp=2,dp=4,micro_batch=2,batch=16,activations=1,gradients=1", "dp=8,zero=2,batch=16,gradients=1"):
        drawing = draw(simulate(gpt(spec), draws=0))
        tasks = [task for tasks in drawing.tasks for task, _, _ in tasks if task.duration and task.part not in OTHERS]
        assert tasks
        assert all(dict(task.detail)["bytes"] for task in tasks)


def test_strips_that_run_alike_share_their_tasks(tmp_path: Path) -> None:
    drawing = draw(step_of(load_plan(piped().save(tmp_path / "p"))).simulation)
    assert len(drawing.strips) > len(drawing.tasks) > 2


def test_the_page_loads_nothing_and_runs_only_itself(folder: Path) -> None:
    page = read(folder)
    addresses = set(re.findall(r"(?:https?:)?//[a-z][^\s'\"`)]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    script, style = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", page, re.DOTALL)[::-1]
    for text in (script[0], style[1]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy.group(1)
    assert "default-src 'none'" in policy.group(1)
    assert "unsafe" not in policy.group(1)


def test_scripts_write_text_and_never_markup() -> None:
    for path in ASSETS.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|fetch\(", text), (
            path
        )
        assert len(text.splitlines()) <= 400


HOSTILE = "</script><img src=x onerror=alert(1)>\u2028'\"&{{script}}"


def test_names_stay_names(tmp_path: Path) -> None:
    plan = sharded()
    document = {**plan.document, "source": {**plan.document["source"], "name": HOSTILE}}
    page = write_page(document, plan.drawn or {})
    assert data_of(page)["plan"]["source"]["name"] == HOSTILE
    assert page.count("<script") == 2
    assert "<img" not in page
    places = read(plan.save(tmp_path / "p")).count("{{script}}")
    assert page.count("{{script}}") == places + 2, "in the title and the data, as text"


def test_a_page_without_drawing_is_not_written(tmp_path: Path) -> None:
    folder = replace(plain(), drawn=None).save(tmp_path / "p")
    assert not (folder / "report.html").exists()


def test_what_is_no_package_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        saved_page(tmp_path)
    folder = plain().save(tmp_path / "p")
    text = (folder / "plan.json").read_text(encoding="utf-8")
    (folder / "plan.json").write_text(text.replace('"format_version": ', '"format_version": 9'), encoding="utf-8")
    with pytest.raises(VerificationError):
        saved_page(folder)


def test_equal_plans_have_equal_pages(tmp_path: Path) -> None:
    plan = sharded()
    assert read(plan.save(tmp_path / "a")) == read(plan.save(tmp_path / "b"))


def test_the_memory_of_a_pipeline_is_that_of_its_fullest_stage() -> None:
    workload = gpt("pp=4,dp=2,micro_batch=1,batch=16,schedule=1f1b")
    memory = step_memory(workload)
    sizes = [entry.total_bytes for entry in memory.stages]
    assert sizes[-1] < max(sizes), "the last one is not the fullest"
    (told,) = step_facts(simulate(workload, draws=0), memory)["peak_bytes"].values()
    assert told == max(sizes)
