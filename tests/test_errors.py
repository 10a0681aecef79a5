"""The three-part message, and a page for each slug."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ir.errors import InternalError, PdvError, UnsupportedOperatorsError, UsageError

DOCS = Path(__file__).parent.parent / "docs" / "errors.md"


def test_three_parts() -> None:
    assert str(UsageError("x is 3", "Allowed: 1, 2", "Choose one")) == "usage: x is 3. Allowed: 1, 2. Choose one."
    assert str(UsageError("x is 3?")) == "usage: x is 3?"


def test_all_unsupported_operators_are_named() -> None:
    error = UnsupportedOperatorsError(("aten.foo at a.py:1", "aten.bar at b.py:2"))
    assert "(2): aten.foo at a.py:1, aten.bar at b.py:2" in str(error)


@pytest.mark.parametrize(
    "error", [UsageError("a", "b", "c"), InternalError("a", report="b"), UnsupportedOperatorsError(("x at y",))]
)
def test_errors_cross_process_borders(error: PdvError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert vars(copy) == vars(error)


def test_exit_codes_and_pages() -> None:
    page = DOCS.read_text(encoding="utf-8")
    codes = {cls.slug: cls.exit_code for cls in PdvError.__subclasses__() if cls.__module__ == "ir.errors"}
    assert sorted(set(codes.values())) == [2, 3, 4, 5, 6, 7, 8, 9, 70]
    for slug in codes:
        assert f"## {slug}\n" in page, f"docs/errors.md has no section {slug}"
