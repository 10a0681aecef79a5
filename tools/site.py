"""The site of the documentation: pages put together in one folder, as Sphinx reads them.

    python -m tools.site [FOLDER]

Pages of docs/ and some from beside it (README, CONTRIBUTING, …) are copied to FOLDER (build/pages); links to other
files of the repository lead to copies of these. Nothing in a page is of the generator: it reads the same in the
repository.
`make docs` builds the site, `docs/conf.py` says how. Entry point: ``assemble``.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/README.md": "records.md",
}
"""Pages that lie outside docs/, and where they are on the site."""

CONTENTS = {
    "Start": ("tutorial", "install"),
    "How to": (
        "clusters", "new-hardware", "operators", "rules", "pins", "training", "loops", "launch", "report", "why",
        "fitting", "slower", "bench", "simulate", "jobs", "engines",
    ),
    "Ideas": (
        "architecture", "searches", "proof", "cost-model", "collectives", "simulator", "memory", "decisions/index",
    ),
    "Reference": ("commands", "fields", "api", "errors", "plan-format", "profiles", "coverage"),
    "Measured": ("figures", "comparison", "records"),
    "Project": ("contributing", "style", "changelog"),
}  # fmt: skip
"""Sections of the site, and their pages in order."""

LINK = re.compile(r"\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
LISTED = {".yaml": "yaml"}


def assemble(folder: Path) -> None:
    """Write all pages of the site, and the files that they link to, into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    sources = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")] + list(OUTSIDE)
    for source in sources:
        text = (ROOT / source).read_text(encoding="utf-8")
        for target in {resolved(source, match["target"]) for match in LINK.finditer(text)}:
            if target not in OUTSIDE and not target.startswith("docs/"):
                _copy(target, folder / place_of(target))
        write(folder / place_of(source), relinked(text, source))
    write(folder / "decisions" / "index.md", decisions())
    with (folder / "index.md").open("a", encoding="utf-8") as index:
        index.write("".join(map(_tree, CONTENTS.items())))


def relinked(text: str, source: str) -> str:
    """A page's text with its links as they are on the site."""
    here = posixpath.dirname(place_of(source)) or "."

    def lead(match: re.Match[str]) -> str:
        place = place_of(resolved(source, match["target"]))
        return f"]({posixpath.relpath(place, here)}{match['anchor'] or ''})"

    return LINK.sub(lead, text)


def resolved(source: str, target: str) -> str:
    """A link's target, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def place_of(path: str) -> str:
    """Where a file or folder of the repository is on the site."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if (ROOT / path).is_dir():
        return path.removeprefix("docs/") + "/index.md"
    return path.removeprefix("docs/")


def decisions() -> str:
    """The page that lists the decisions, by their headings."""
    names = sorted(path.stem for path in (ROOT / "docs" / "decisions").glob("*.md"))
    return "# Decisions\n\n```{toctree}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(path: str, place: Path) -> None:
    """A file as it is; of a folder a page with its texts."""
    if not (ROOT / path).is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, place)
        return
    files = [each for each in sorted((ROOT / path).iterdir()) if each.suffix in LISTED]
    blocks = [f"## {each.name}\n\n```{LISTED[each.suffix]}\n{each.read_text(encoding='utf-8')}```\n" for each in files]
    write(place, f"---\norphan: true\n---\n\n# {path}\n\n" + "\n".join(blocks))


def _tree(section: tuple[str, tuple[str, ...]]) -> str:
    """One part of the table of contents; it is shown beside every page, not in the text."""
    caption, pages = section
    return "\n```{toctree}\n:hidden:\n:maxdepth: 1\n:caption: " + f"{caption}\n\n" + "\n".join(pages) + "\n```\n"


if __name__ == "__main__":
    assemble(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "pages")
