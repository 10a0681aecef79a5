"""report.html in a real browser: nothing is asked for, nothing complains, and every part of it answers.

Without a Chromium these are skipped; `apt-get install chromium` brings one. The check of accessibility takes axe-core
(`npm install axe-core`, of which AXE_CORE names axe.min.js).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdv.page import write_page
from pdv.report.saved import explanation
from tests.browser.chromium import Page, find_browser, open_page
from tests.pdv.report.pages import data_of, piped, plain, read, sharded, stale

BROWSER = find_browser()
AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))
MUST = "BROWSER_TESTS" in os.environ  # where a browser has to be, its absence is a failure
WITHOUT = "no Chromium is installed here (apt-get install chromium)"
pytestmark = pytest.mark.skipif(BROWSER is None and not MUST, reason=WITHOUT)
WIDTHS = (1280, 400)
SEEN = {"sharded": sharded, "piped": piped, "stale": stale, "one device": plain, "inference": lambda: plain("infer", 2)}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert BROWSER is not None, WITHOUT
    with open_page(BROWSER) as opened:
        yield opened


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packages, each with all that a page may say."""
    return {name: make().save(tmp_path_factory.mktemp("pages") / "p") for name, make in SEEN.items()}


def show(page: Page, path: Path, width: int = 1280) -> None:
    page.events.clear()
    page.resize(width, 900)
    page.load(path)
    assert page.complaints == []
    assert page.run("document.documentElement.dataset.ready") == "yes"


def with_reasons(folder: Path) -> Path:
    """The package's page with what `pdv report` adds."""
    document = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    rows = [
        {"name": "DDP", "detail": "x=4", "step_s": 1.0, "fits": True},
        {"name": "TP", "step_s": None, "why": "none"},
    ]
    facts = {name: value for name, value in data_of(read(folder)).items() if name not in ("plan", "version")}
    asked = {"why": explanation(folder), "experts": rows, "sensitivity": rows}
    path = folder / "with-reasons.html"
    path.write_text(write_page(document, {**facts, **asked}), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SEEN)
def test_it_draws_without_a_complaint_or_a_request(page: Page, folders: dict[str, Path], name: str, width: int) -> None:
    for path in (folders[name] / "report.html", with_reasons(folders[name])):
        show(page, path, width)
        assert page.requests == []
        assert page.run("document.documentElement.scrollWidth") <= width, "nothing is wider than the page"


@pytest.mark.parametrize("name", ["piped", "stale"])
def test_numbers_are_those_of_the_plan(page: Page, folders: dict[str, Path], name: str) -> None:
    document = json.loads((folders[name] / "plan.json").read_text(encoding="utf-8"))
    show(page, folders[name] / "report.html")
    shown: list[list[str]] = page.run(
        "[...document.querySelectorAll('.num[data-from]')].map(n => [n.dataset.from, n.dataset.v, n.textContent])"
    )
    places = [place for place, _, _ in shown]
    assert {"predicted.step_time_s.mean", "predicted.step_time_s.std", "search.cost", "search.gap"} <= set(places)
    assert sum(place.startswith("predicted.breakdown_s.") for place in places) >= 3
    for place, raw, text in shown:
        value: Any = document
        for part in place.split("."):
            value = value[part]
        assert float(raw) == value
        assert _read(text) == pytest.approx(value, rel=6e-3), (place, text)


def test_a_step_that_does_not_empty_the_pipeline_is_told_so(page: Page, folders: dict[str, Path]) -> None:
    told = "document.getElementById('timeline').textContent"
    show(page, folders["stale"] / "report.html")
    assert "No step empties the pipeline: each stage ends one every" in page.run(told)
    assert "gradients of weights one step old" in page.run("document.getElementById('plan').textContent")
    label = page.run("document.getElementById('gantt').getAttribute('aria-label')")
    step = page.run("document.querySelector('.num[data-from=\"predicted.step_time_s.mean\"]').textContent")
    assert label.startswith(f"Timeline of one step, {step},")
    show(page, folders["piped"] / "report.html")
    assert "empties" not in page.run(told)


def test_what_is_on_the_host_and_how_a_step_runs_is_said(page: Page, folders: dict[str, Path], tmp_path: Path) -> None:
    facts = data_of(read(folders["piped"]))
    document = facts.pop("plan")
    document["simulated"]["host_bytes"] = 7 * 2**30
    path = tmp_path / "page.html"
    path.write_text(write_page(document, {name: value for name, value in facts.items() if name != "version"}))
    show(page, path)
    assert "up to 7 GiB of its host's memory" in page.run("document.getElementById('memory-card').textContent")
    assert "2 stages (1f1b), 4 micro-batches" in page.run("document.getElementById('plan').textContent")


def test_devices_of_two_kinds_in_another_order_are_told_apart(
    page: Page, folders: dict[str, Path], tmp_path: Path
) -> None:
    facts = data_of(read(folders["piped"]))
    document = facts.pop("plan")
    (level, *_), cluster = document["cluster"]["levels"], document["cluster"]
    inner = {**level, "name": "inner", "link": {**level["link"], "name": f"{level['link']['name']}+another"}}
    outer = {**level, "name": "outer", "link": {**level["link"], "name": "slow"}}
    cluster |= {"levels": [outer, inner], "places": [2, 3, 0, 1]}
    facts["timeline"]["held"][0]["capacity_bytes"] = 3 * 2**40
    path = tmp_path / "page.html"
    path.write_text(write_page(document, {name: value for name, value in facts.items() if name != "version"}))
    show(page, path)
    told = "stage 0 is on 2 to 3, stage 1 is on 0 to 1"
    assert told in page.run("document.getElementById('cluster').textContent")
    rows = page.run("[...document.querySelectorAll('#cluster tr')].map(row => row.textContent)")
    assert ["dp: " in row for row in rows if "inner" in row or "outer" in row] == [False, True]
    assert "of 3 TiB" in page.run("document.getElementById('memory').textContent")


def _read(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "%": 1e-2}[unit]


def test_the_timeline_zooms_and_tells(page: Page, folders: dict[str, Path]) -> None:
    show(page, folders["piped"] / "report.html")
    span = "(() => { const d = document.getElementById('gantt').dataset; return d.to - d.from; })()"
    whole = page.run(span)
    page.run("document.getElementById('zoom-in').click()")
    page.settle()
    assert page.run(span) == pytest.approx(whole / 2)
    page.run("document.getElementById('gantt').focus()")
    page.run("document.getElementById('gantt').scrollIntoView({behavior: 'instant'})")
    box = page.run("(b => [b.x, b.y, b.width])(document.getElementById('gantt').getBoundingClientRect())")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="+")
    page.settle()
    assert page.run(span) == pytest.approx(whole * 0.3)
    line = data_of(read(folders["piped"]))["timeline"]
    _, start, _, end, *_ = next(strip for strip in line["strips"] if strip[0] == 0)
    gutter = 168  # where lanes begin, on a wide screen
    x, y = box[0] + gutter + (start + end) / 2 / line["end"] * (box[2] - gutter), box[1] + 34
    page.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-120, modifiers=2)
    page.settle()
    assert page.run(span) < whole * 0.3
    page.run("document.getElementById('zoom-all').click()")
    page.settle()
    assert page.run(span) == whole
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert "micro-batch" in page.run("document.getElementById('picked').textContent")
    assert page.complaints == []


def test_a_block_opens_and_an_operator_says_why(page: Page, folders: dict[str, Path]) -> None:
    show(page, with_reasons(folders["sharded"]))
    opened = "document.querySelectorAll('.block [aria-expanded=true]').length"
    assert page.run(opened) == 1, "the longest is open"
    page.run("document.querySelector('.block [aria-expanded=false]').click()")
    assert page.run(opened) == 2
    page.run("[...document.querySelectorAll('.node')].find(n => n.textContent.startsWith('linear'))"
             ".dispatchEvent(new MouseEvent('click'))")  # fmt: skip
    told = page.run("document.getElementById('why').textContent")
    assert "best rejected cut" in told
    assert "Along tp, instead of" in told
    page.run("document.querySelector('.node.move').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
    assert "along" in page.run("document.getElementById('why').textContent")
    assert page.complaints == []


def test_it_turns_dark_and_light(page: Page, folders: dict[str, Path]) -> None:
    show(page, folders["sharded"] / "report.html")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.run("document.getElementById('theme').click()")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    assert page.run(ground) != light
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == light
    assert page.complaints == []


HOSTILE = "</script><img src=x onerror='window.hurt=1'>{{data}}\u2028"


def test_names_of_a_user_are_text(page: Page, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["sharded"]
    text = (folder / "plan.json").read_text(encoding="utf-8").replace('"gpt"', json.dumps(HOSTILE))
    facts = json.loads(json.dumps(sharded().drawn).replace("layers", json.dumps(HOSTILE)[1:-1]))
    (tmp_path / "hostile.html").write_text(write_page(json.loads(text), facts), encoding="utf-8")
    show(page, tmp_path / "hostile.html")
    assert page.run("[typeof window.hurt, document.images.length]") == ["undefined", 0]
    assert HOSTILE.split("{{", maxsplit=1)[0] in page.run("document.querySelector('h1').textContent")
    assert page.requests == []


def test_a_script_that_was_put_in_does_not_run(page: Page, folders: dict[str, Path], tmp_path: Path) -> None:
    """The policy refuses what the page was not written with."""
    changed = read(folders["sharded"]).replace("<main", "<script>window.hurt = 1</script><img src='x.png'><main")
    (tmp_path / "changed.html").write_text(changed, encoding="utf-8")
    page.events.clear()
    page.load(tmp_path / "changed.html")
    assert page.run("typeof window.hurt") == "undefined"
    assert len(page.complaints) == 2


@pytest.mark.skipif(not AXE.is_file() and not MUST, reason="no axe-core here (npm install axe-core, or AXE_CORE=FILE)")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["sharded", "piped", "stale"])
def test_everybody_can_use_it(page: Page, folders: dict[str, Path], name: str, theme: str) -> None:
    show(page, with_reasons(folders[name]))
    if theme == "dark":
        page.run("document.getElementById('theme').click()")
    page.run("document.querySelector('.node').dispatchEvent(new MouseEvent('click'))")
    page.run(AXE.read_text(encoding="utf-8") + ";1")
    found: list[dict[str, Any]] = page.run("axe.run().then(r => r.violations)")
    grave = {one["id"]: one["nodes"][0]["html"] for one in found if one["impact"] in ("serious", "critical")}
    assert grave == {}
