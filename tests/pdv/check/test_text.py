"""Numbers of a text exchanged for those of another size, whatever else was edited in it."""

from __future__ import annotations

import pytest

from ir.errors import VerificationError
from pdv.check.text import at_sizes

LARGE = '''"""Made for 768."""

def f(x):
    """x [8, 768]"""
    y = x.reshape(-1, 12, 64)  # [8, 12, 64]
    return call(
        y.narrow(1, 0, 384),
        x,
    )
'''
SMALL = '''"""Made for 16."""

def f(x):
    """x [2, 16]"""
    y = x.reshape(-1, 2, 8)  # [2, 2, 8]
    return call(y.narrow(1, 0, 8), x)
'''


def test_numbers_are_exchanged_and_layout_stays() -> None:
    found = at_sizes(LARGE, LARGE, SMALL)
    assert found == LARGE.replace("12, 64)  #", "2, 8)  #").replace("384", "8")


def test_edits_stay() -> None:
    edited = LARGE.replace("y.narrow(1, 0, 384)", "relu(y).narrow(1, 1, 384)").replace("x [8", "x, edited [8")
    found = at_sizes(edited, LARGE, SMALL)
    assert found is not None
    assert "relu(y).narrow(1, 1, 8)" in found
    assert "reshape(-1, 2, 8)" in found


def test_another_structure_is_none() -> None:
    assert at_sizes(LARGE, LARGE, SMALL.replace("narrow", "chunk")) is None


def test_equal_emissions_leave_the_text_alone() -> None:
    assert at_sizes("anything", LARGE, LARGE) == "anything"


def test_no_python_is_refused() -> None:
    with pytest.raises(VerificationError, match="no Python"):
        at_sizes(LARGE + "\n'''", LARGE, SMALL)
