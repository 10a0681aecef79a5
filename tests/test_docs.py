"""What the documentation shows is true: cluster files load, linked pages exist, named presets are all of them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from benchmarks.figures import pages
from pdv.cluster import load_cluster
from pdv.cluster.nodes import NODES
from pdv.cluster.presets import DEVICES, LINKS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path) -> list[str]:
    """The indented blocks of a page."""
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [textwrap.dedent(block).lstrip("\n") for block in found]


CLUSTERS = [block for page in PAGES for block in blocks(page) if block.startswith("nodes:")]


@pytest.mark.parametrize("text", CLUSTERS)
def test_cluster_files_of_the_documentation_load(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert load_cluster(path).num_devices == eval_devices(text)


def test_figures_are_those_of_the_records() -> None:
    """`python benchmarks/figures.py` writes them; a figure of a record is written nowhere by hand."""
    for page, text in pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name} is not what benchmarks/figures.py writes"


def eval_devices(text: str) -> int:
    """Devices counted from the text itself."""
    nodes = yaml.safe_load(text)["nodes"]
    return sum(node.get("count", 1) * (node.get("devices") or NODES[node["preset"]].devices) for node in nodes)


def test_all_presets_are_named() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert len(CLUSTERS) == 8
    for name in (*DEVICES, *LINKS, *NODES):
        assert f"`{name}`" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


OF_THE_HOUSE = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "style.md"]


@pytest.mark.parametrize("page", OF_THE_HOUSE, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:ir|pdv|learned_cost|tests|benchmarks|docs|examples)/[\w./-]+)`", page.read_text("utf-8"))
    assert len(named) > 3
    assert not [name for name in named if "NAME" not in name and not (ROOT / name).exists()]


def test_nothing_cites_what_is_not_here() -> None:
    files = [
        path for root in ("ir", "pdv", "learned_cost", "tests", "benchmarks") for path in (ROOT / root).rglob("*.py")
    ]
    cited = re.compile(r"\b(DESIGN|STYLE|MACHINE)(\.md| section|:)|/shared\b")
    assert not [path for path in (*files, *PAGES) if path != Path(__file__) and cited.search(path.read_text("utf-8"))]
    for path in (*files, *PAGES):
        for page in re.findall(r"\bdocs/[\w-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / page).exists() or path == Path(__file__), f"{path} cites {page}"


def test_the_hosted_ci_runs_what_is_run_by_hand() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["ci"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    targets = re.findall(r"^make (.+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
