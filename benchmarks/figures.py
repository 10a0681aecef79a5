"""Figures that documents quote, filled in from the records of benchmarks.

    python benchmarks/figures.py [--smoke]

It writes docs/figures.md, and the section of README that says what is measured; with --smoke nothing.
Templates (`benchmarks/results/*.template.md`) name a record, a figure of its summary and a format:
``{{scale; gpt2 on 2x4: search; .1f}}``. A format that ends in ``%`` takes a share, others the value in its own unit.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.coverage_runs.architectures import OUTCOMES
from benchmarks.record import ROOT, arguments

RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"\{\{([^;{}]+); ([^;{}]+); ([^;{}]+)\}\}")
MEASURED = re.compile(r"(?<=\n## Measured\n\n).*?(?=\n## )", re.DOTALL)


def main() -> None:
    """Write the pages that are not what they have to be."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            print(path.name)
            if not options.smoke:
                path.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """The pages as they have to be."""
    figures, readme = ROOT / "docs" / "figures.md", ROOT / "README.md"
    measured = fill((RESULTS / "measured.template.md").read_text(encoding="utf-8"))
    return {
        ROOT / "docs" / "coverage.md": coverage(),
        figures: fill((RESULTS / "figures.template.md").read_text(encoding="utf-8")),
        readme: MEASURED.sub(lambda _: measured, readme.read_text(encoding="utf-8")),
    }


def coverage() -> str:
    """docs/coverage.md: figures, and what is refused."""
    from benchmarks.coverage_runs.nodes import refusals

    template = _architectures((RESULTS / "coverage.template.md").read_text(encoding="utf-8"))
    rows = json.loads((RESULTS / "coverage_nodes.json").read_text(encoding="utf-8"))["rows"]
    lines = [f"| {count} | {operator} | {why} |" for count, operator, why in refusals(rows)]
    return fill(template.replace("REFUSED", "\n".join(["| tests | operator | why |", "|---|---|---|", *lines])))


def _architectures(template: str) -> str:
    """What stands in the way of the architectures that are not planned, and the names of the others."""
    for place, record in (("ARCHITECTURES", "architectures"), ("FURTHER", "further")):
        rows = _rows(record)
        planned = ", ".join(row["architecture"] for row in rows if row["outcome"] == "planned")
        others = [row for row in rows if row["outcome"] != "planned"]
        lines = [f"| {row['architecture']} | {row['outcome']} | {'; '.join(row['reasons'])} |" for row in others]
        table = "\n".join(["| architecture | outcome | why |", "|---|---|---|", *lines])
        template = template.replace(f"{place} PLANNED", planned).replace(place, table)
    options = ("with `--freeze`", "with `--weights`")
    columns = ("route", "run", "planned", "of these by the module's own graph", *options, *OUTCOMES[1:])
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *map(_route, ROUTES)]
    refused = ["| architecture | route | outcome | why |", "|---|---|---|---|"]
    refused += [
        f"| {row['architecture']} | {row['route']} | {row['outcome']} | {'; '.join(row['reasons'])} |"
        for row in (each for route in ROUTES for each in _rows(route))
        if row["outcome"] not in ("planned", "alike")
    ]
    template = template.replace("ROUTES", "\n".join(lines)).replace("FILES", "\n".join(refused))
    return template.replace("TORCHRUN", _launched()).replace("LARGER", _compare_sizes())


def _compare_sizes() -> str:
    """What becomes of plain files of models that were small, and of the same ones larger."""
    small = {row["architecture"]: row for row in _rows("plain")}
    lines = ["| architecture | small | larger | why, larger |", "|---|---|---|---|"]
    for row in _rows("larger"):
        outcomes = [_say_outcome(each) for each in (small[row["architecture"]], row)]
        lines.append(f"| {' | '.join((row['architecture'], *outcomes, '; '.join(row['reasons'])[:200]))} |")
    return "\n".join(lines)


def _say_outcome(row: Mapping[str, Any]) -> str:
    outcome = "planned" if row["outcome"] == "alike" else str(row["outcome"])
    return f"{outcome}, `--freeze`" if outcome == "planned" and "freeze" in row else outcome


def _launched() -> str:
    """What was run on processes, and the largest differences from the modules."""
    rows = _rows("torchrun")
    same = [row for row in rows if row["outcome"] == "planned"]
    worst = {what: max(row["torchrun"][what] for row in rows if "torchrun" in row) for what in ("loss", "gradients")}
    names = ", ".join(row["architecture"] for row in rows)
    return (
        f"{len(same)} of {len(rows)} ({names}) gave the module's loss, off by {worst['loss']:.0e} of it at most, and "
        f"its gradients, by {worst['gradients']:.0e} of the largest element."
    )


ROUTES = ("own", "plain")


def _rows(record: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"coverage_{record}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def _route(route: str) -> str:
    """The outcomes of one way to export files."""
    rows = _rows(route)
    count = Counter(row["outcome"] for row in rows)
    planned, alike = count["planned"] + count["alike"], sum(bool(row.get("alike")) for row in rows)
    done = [row for row in rows if row["outcome"] in ("planned", "alike")]
    frozen, proved = (sum(option in row for row in done) for option in ("freeze", "weights"))
    others = " | ".join(str(count[outcome]) for outcome in OUTCOMES[1:])
    return f"| {route} | {len(rows)} | {planned} | {alike} | {frozen} | {proved} | {others} |"


def fill(template: str) -> str:
    """The text with every figure in its place.

    Raises:
        KeyError: where a record has no such figure.
    """
    return PLACE.sub(lambda match: figure(match[1], match[2], match[3]), template)


def figure(record: str, name: str, spec: str) -> str:
    """One figure of a record, formatted."""
    value = summary(record)[name]
    if spec == "d":
        return str(round(value))
    return format(value, spec).replace("%", " %")


@lru_cache
def summary(record: str) -> dict[str, float]:
    """What a record claims."""
    content = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry["value"] for entry in content["summary"]}


if __name__ == "__main__":
    main()
