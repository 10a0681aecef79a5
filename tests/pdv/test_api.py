"""docs/api.md is what the package offers: every public name is there, and every name there is public."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib import import_module, resources
from typing import Any, get_type_hints

import pytest

import pdv
from tests.test_docs import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_name_is_on_the_page() -> None:
    rows = re.findall(r"^\| (`pdv[^|]+) \|", PAGE, re.MULTILINE)
    named = set(re.findall(r"`pdv\.(\w+)", " ".join(rows)))
    assert named == set(pdv.__all__)
    assert dir(pdv) == sorted(pdv.__all__)
    for name in named:
        assert inspect.getdoc(getattr(pdv, name)), name


@pytest.mark.parametrize("name", ["optimize", "verify", "explain", "register_operator"])
def test_arguments_are_on_the_page(name: str) -> None:
    """In order, with the star behind which they go by keyword."""
    parameters = inspect.signature(getattr(pdv, name)).parameters.values()
    said = re.search(rf"\| `pdv\.{name}\(([^)]*)\)`", PAGE)
    assert said
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    words = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    shown = [word for word in said[1].split(", ") if word != "…"]
    assert shown == [*words, *(["*"] if keywords else []), *keywords][: len(shown)]
    listed = re.search(r"Arguments of `pdv\.optimize`.*?: (.*?)\. Their", PAGE, re.DOTALL)
    assert listed
    if "…" in said[1]:
        assert re.findall(r"`(\w+)`", listed[1]) == words + keywords
    else:
        assert len(shown) == len(words) + len(keywords) + bool(keywords)


@pytest.mark.parametrize(
    ("kind", "own"), [(pdv.Plan, {"emission", "weights", "drawn"}), (pdv.Watch, set()), (pdv.Standing, set())]
)
def test_attributes_are_on_the_page(kind: Any, own: set[str]) -> None:
    """``own``: what is the compiler's."""
    public = {name for name in vars(kind) if not name.startswith("_")} | {each.name for each in fields(kind)}
    (row,) = [line for line in PAGE.splitlines() if re.match(rf"\| .*`pdv\.{kind.__name__}`", line)]
    assert own < public or not own
    assert public - own <= set(re.findall(r"`(\w+)`", row))


def test_everything_is_typed() -> None:
    for package in ("pdv", "ir", "learned_cost"):
        assert resources.files(package).joinpath("py.typed").is_file()
    for name in ("verify", "explain"):
        function = inspect.unwrap(getattr(pdv, name))
        hints = get_type_hints(function, vars(import_module(function.__module__)))
        assert set(hints) == {*inspect.signature(function).parameters, "return"}


def test_errors_are_all_there() -> None:
    errors = {name for name in pdv.__all__ if name.endswith("Error")}
    slugs = {getattr(pdv, name).slug for name in errors - {"PdvError"}}
    table = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split("## usage")[0]
    assert slugs <= set(re.findall(r"`([a-z-]+)`", table))
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = pdv.optimise
