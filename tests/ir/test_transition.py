"""What follows of a parallel operator from its states: its dual, what ranks send, its dims."""

from __future__ import annotations

import pytest

from ir.ops import OPERATORS
from ir.ops.parallel import TRANSITIONS, move
from ir.sharding import Invariant, Partial, Replicate, Shard
from ir.transition import STAYS, Communication

SLICE, GATHER, SUM, NONE = Communication.SLICE, Communication.ALL_GATHER, Communication.ALL_REDUCE, Communication.NONE
SCATTER, EXCHANGE = Communication.REDUCE_SCATTER, Communication.ALL_TO_ALL


@pytest.mark.parametrize(
    ("name", "dual", "forward"),
    [
        ("partition", "combine", SLICE), ("combine", "partition", GATHER), ("replicate", "reduce", NONE),
        ("reduce", "replicate", SUM), ("all_gather", "reduce_scatter", GATHER), ("all_to_all", "all_to_all", EXCHANGE),
        ("reduce_scatter", "all_gather", SCATTER), ("reduce_replicate", "reduce_replicate", SUM),
    ],
)  # fmt: skip
def test_each_operator_and_its_dual(name: str, dual: str, forward: Communication) -> None:
    """The table of docs/architecture.md (States), and its fusions."""
    assert TRANSITIONS[name].dual == TRANSITIONS[dual]
    assert TRANSITIONS[name].forward is forward
    assert TRANSITIONS[dual].backward is forward


def test_who_sums_and_who_gathers() -> None:
    def named(trait: str) -> set[str]:
        return {name for name, transition in TRANSITIONS.items() if getattr(transition, trait)}

    assert named("sums") == {"reduce", "reduce_scatter", "reduce_replicate"}
    assert named("gathers") == {"combine", "all_gather"}
    assert named("fetches") == {"combine", "all_gather", "all_to_all"}
    assert named("only_names") == {"replicate"}


def test_states_have_the_dims_of_the_attributes() -> None:
    attrs = {"dim": 1, "to_dim": 2, "axis": "tp"}
    assert TRANSITIONS["all_to_all"].states(attrs) == (Shard(1), Shard(2))
    assert TRANSITIONS["reduce_scatter"].states(attrs) == (Partial(), Shard(1))
    assert TRANSITIONS["all_to_all"].joined_dims(attrs) == (1, 2)
    assert TRANSITIONS["partition"].joined_dims(attrs) == (0, 1)


def test_a_move_is_found_by_its_states() -> None:
    assert move(Shard(0), Shard(1)) == ("all_to_all", {"dim": 0, "to_dim": 1})
    assert move(Partial(), Shard(2)) == ("reduce_scatter", {"dim": 2})
    assert move(Shard(1), Shard(1)) is None
    assert move(Replicate(), Invariant()) is None


def test_operators_that_compute_change_no_state() -> None:
    computing = [op for op in OPERATORS.values() if op.kind != "parallel"]
    assert {op.transition for op in computing} == {STAYS}
    assert not any((STAYS.sums, STAYS.gathers, STAYS.fetches, STAYS.only_names, STAYS.dims))
    assert STAYS.communications == (NONE, NONE)
