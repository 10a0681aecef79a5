"""Repeats in sequences, against looking at all of them."""

from __future__ import annotations

import random

import pytest

from ir.proof.repeats import Repeat, find_repeats
from pdv.search.blocks import longest_repeat


@pytest.mark.parametrize("seed", range(20))
def test_repeats_are_maximal_and_equal_turns(seed: int) -> None:
    draw = random.Random(seed)
    keys = [draw.choice("abc") for _ in range(draw.randrange(2, 14))]
    found = set(find_repeats(keys))
    for period in range(1, len(keys) // 2 + 1):
        for start in range(len(keys)):
            count = 1
            while keys[start : start + period] == keys[start + count * period : start + (count + 1) * period]:
                count += 1
            if start + period * count > len(keys) or count < 2:
                continue
            before = start > 0 and keys[start - 1] == keys[start - 1 + period]
            assert before or Repeat(start, period, count) in found
    for one in found:
        turns = [keys[at : at + one.period] for at in range(one.start, one.stop, one.period)]
        assert turns == turns[:1] * one.count


def test_items_without_a_key_repeat_nothing() -> None:
    assert list(find_repeats([None, None, "a", "a", None])) == [Repeat(2, 1, 2)]


def test_two_equal_items_far_apart_hide_no_stack() -> None:
    assert longest_repeat([*"aaaaa", *"xbcdefghxijklmn"]) == Repeat(0, 1, 5)
