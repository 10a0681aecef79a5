"""What is measured next: far from what is known, where neighbours differ, and in fair turns."""

from __future__ import annotations

import numpy as np

from ir.types import DType, TensorType
from learned_cost.profile.programs.pieces import Piece
from learned_cost.profile.programs.sampling import Fair, Pool, place


def product(m: int, plan: str = "") -> Piece:
    types = (TensorType((m, 64), DType.F32), TensorType((64, 64), DType.F32))
    return Piece("linear", types, (), (True, True), plan)


def rows_of(piece: Piece | None) -> int:
    assert piece is not None
    return piece.operands[0].shape[0]


def test_the_farthest_comes_next() -> None:
    pool = Pool([product(m) for m in (64, 80, 4096)])
    pool.learn(product(60).forward, 0.0)
    taken = pool.take()
    assert rows_of(taken) == 4096
    assert taken is not None
    pool.learn(taken.forward, 0.0)
    assert rows_of(pool.take()) == 80
    pool.take()
    assert pool.take() is None


def test_the_middle_comes_first() -> None:
    assert rows_of(Pool([product(m) for m in (1, 64, 4096)]).take()) == 64


def test_every_other_shape_is_of_a_plan() -> None:
    pool = Pool([product(m) for m in (128, 4096, 8192)] + [product(70, "gpt2 on 4"), product(80, "gpt2 on 4")])
    pool.learn(product(64).forward, 0.0)
    assert [rows_of(pool.take()) for _ in range(5)] == [80, 8192, 70, 4096, 128]


def test_shapes_of_a_given_plan_come_first() -> None:
    pool = Pool([product(8192), product(70, "mine"), product(80, "mine")], plans_first=True)
    pool.learn(product(64).forward, 0.0)
    assert [rows_of(pool.take()) for _ in range(3)] == [80, 70, 8192]


def test_more_is_asked_where_neighbours_differ() -> None:
    pool = Pool([product(32), product(1024)])
    for m, surprise in ((16, 0.0), (64, 0.0), (512, 0.0), (2048, 2.0)):
        pool.learn(product(m).forward, surprise)
    assert rows_of(pool.take()) == 1024


def test_dtypes_are_apart() -> None:
    half = Piece("gelu", (TensorType((4, 4), DType.BF16),), (("approximate", "tanh"),))
    full = Piece("gelu", (TensorType((4, 4), DType.F32),), (("approximate", "tanh"),))
    assert np.linalg.norm(place(half.forward) - place(full.forward)) > 2


def test_turns_are_fair_by_time() -> None:
    slow, fast, heavy = "slow", "fast", "heavy"
    fair = Fair([(slow, 1.0), (fast, 1.0), (heavy, 2.0)])
    spent = dict.fromkeys((slow, fast, heavy), 0.0)
    for _ in range(400):
        who = fair.turn()
        seconds = 0.5 if who is slow else 0.1
        spent[who] += seconds
        fair.spent(who, seconds)
    assert abs(spent[slow] - spent[fast]) < 0.6
    assert abs(spent[heavy] - 2 * spent[fast]) < 0.6
    for who in (slow, fast, heavy):
        fair.drop(who)
    assert fair.turn() is None
