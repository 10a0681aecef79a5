"""What the documentation shows is true: cluster files load, linked pages exist, named presets are all of them."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperCommand, TyperGroup

from benchmarks.figures import pages
from pdv.cli.app import app
from pdv.cluster import load_cluster
from pdv.cluster.nodes import NODES
from pdv.cluster.presets import DEVICES, LINKS
from tools import reference, tutorial
from tools.site import CONTENTS, OUTSIDE, assemble

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path) -> list[str]:
    """The indented blocks of a page."""
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [textwrap.dedent(block).lstrip("\n") for block in found]


def fenced(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that are of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


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


def test_the_reference_is_that_of_the_code() -> None:
    """`python -m tools.reference` writes commands and fields."""
    for page, text in reference.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name} is not what python -m tools.reference writes"


def test_every_field_has_a_meaning() -> None:
    page = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in re.findall(r"^\| `.*", page, re.MULTILINE)]
    assert len(rows) > 90
    assert not [row[0] for row in rows if len(row) != 4 or not row[3].strip(" |")]


def test_the_tutorial_has_steps_that_are_held_to_their_output() -> None:
    steps = tutorial.read_page((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    kinds = [step.kind for step in steps]
    assert kinds.count("run") >= 5
    assert kinds.count("expect") >= 5
    assert all(before == "run" for before, kind in pairwise(kinds) if kind == "expect")
    files = {step.name: step.text for step in steps if step.kind == "file"}
    assert {"model.py", "plan.py", "train.py", "cluster.yaml"} <= set(files)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a 1.0 b\n…\nc", "x\na 1.1 b\ny\nc", True),
        ("a 1.0 b", "a 1.5 b", False),
        ("c\na", "a\nc", False),
        ("step 0: loss 8.4853", "step 0: loss 8.4854", True),
        ("step 0: loss 8.4853", "step 0: loss 8.4953", False),
        ("a 1", "a one", False),
    ],
)
def test_output_is_compared_by_words_and_numbers(expected: str, printed: str, same: bool) -> None:
    assert (not tutorial.explain_difference(expected, printed)) == same


def test_the_lock_is_of_what_is_needed_and_names_no_index() -> None:
    """`make lock` writes it; torch is apart, for its builds differ by machine."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split("[>=]", each)[0].lower() for each in project["dependencies"]}
    assert needed - set(pinned) == {"torch"}
    held = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    ours = {name.lower().replace("_", "-"): version for name, version in held}
    assert {name: ours[name] for name in pinned if name in ours} == {
        name: version for name, version in pinned.items() if name in ours
    }
    assert not re.search(r"^(--|-[a-z]\b)|://", text, re.MULTILINE)


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
    roots = ("ir", "pdv", "learned_cost", "tests", "benchmarks", "tools")
    files = [path for root in roots for path in (ROOT / root).rglob("*.py")]
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


PROGRAMS = [
    (page.name, text)
    for page in PAGES
    for text in (*fenced(page, "python"), *blocks(page))
    if re.match(r"(import|from) \w", text) or text in fenced(page, "python")
]


@pytest.mark.parametrize(("page", "text"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_python_is_python(page: str, text: str) -> None:
    ast.parse(text, filename=page)


def commands() -> dict[str, set[str]]:
    """Each use of pdv that a page prints, and where; what is to fail stands in blocks behind $, and is left out."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = [*blocks(page), *fenced(page, r"\w*")]
        lines = [line.strip() for block in shown for line in block.replace("\\\n", " ").splitlines()]
        for line in [*lines, *re.findall(r"`(pdv [^`\n]+)`", text)]:
            if re.match(r"pdv [a-z-]", line):
                found.setdefault(line, set()).add(page.name)
    return found


@pytest.mark.parametrize("line", commands())
def test_commands_that_are_shown_exist(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        assert words[0] in command.commands, f"{line!r} in {commands()[line]}: no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    words = words[: words.index("--")] if "--" in words else words
    named = {re.split("[=,;)]", word)[0] for word in words if re.match(r"--?[a-z]", word)}
    assert isinstance(command, TyperCommand | TyperGroup)
    assert named <= known, f"{line!r} in {commands()[line]}: no option {named - known}"


def test_every_page_has_its_place_on_the_site(tmp_path: Path) -> None:
    """And only there: `make docs` builds the site strictly, in which a page without a place is an error."""
    assemble(tmp_path / "pages")
    written = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").glob("*.md")}
    named = [page for section in CONTENTS.values() for page in section]
    outside = {Path(place).stem for place in OUTSIDE.values()} - {"index"}
    assert sorted(named) == sorted(written | outside | {"decisions/index"})
    for page in named:
        assert (tmp_path / "pages" / f"{page}.md").exists()
