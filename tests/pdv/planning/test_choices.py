"""The optimizer on the host: asked for, allowed or refused, taken only where it pays, and what it takes and costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from ir.errors import NoPlanFitsError, UsageError
from ir.mesh import Mesh
from ir.types import DType
from pdv.cluster import Device
from pdv.cluster.host import BANDWIDTH, Host, host_of, slowest_host
from pdv.config import Mode
from pdv.pipelines.pinned import FREE
from pdv.plan.cache import problem_key
from pdv.planning.choices import Choice, read_choices, search_choices
from pdv.planning.search import SearchResult
from pdv.problem.precision import AS_EMITTED, MIXED
from pdv.problem.problem import offloaded
from pdv.search.best import BestPlan
from pdv.search.strategies.budget import Budget
from tests.pdv.worlds import DEVICE, mlp, problem

H100, GH200, TOY = (replace(DEVICE, name=name) for name in ("h100-80gb-sxm", "gh200-96gb", "toy"))
CPU = replace(DEVICE, kind="cpu", memory_bandwidth_bytes_per_s=20e9, share=0.5)
OWN, HOSTED = Choice(None), Choice(None, on_host=True)


def choices(
    offload: str = "none", allow: tuple[str, ...] = (), mode: Mode = "train", devices: tuple[Device, ...] = (H100,)
) -> tuple[Choice, ...]:
    """Of a small model."""
    return read_choices("own", offload, allow, mode, FREE, mlp(), devices)


def test_it_is_never_looked_at_unasked_and_first_without() -> None:
    assert choices() == (OWN,)
    assert choices(allow=("offload",)) == (OWN, HOSTED)
    assert choices("optimizer") == (HOSTED,)
    assert choices(allow=("offload",), mode="infer") == (OWN,)


def test_a_cpu_is_its_own_host() -> None:
    assert choices(allow=("offload",), devices=(H100, CPU)) == (OWN,)
    assert choices("optimizer", devices=(CPU,)) == (HOSTED,)
    assert host_of(CPU) == Host(5e9, 10e9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"offload": "everything"}, "'everything' is not known"),
        ({"allow": ("ofload",)}, "offload"),
        ({"offload": "optimizer", "mode": "infer"}, "inference"),
        ({"offload": "optimizer", "allow": ("offload",)}, "allowed"),
    ],
)
def test_what_does_not_go_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choices(**given)


def result(step_s: float, bound_s: float) -> SearchResult:
    """Of a search of one second."""
    nothing = cast("Any", None)
    return SearchResult(BestPlan(nothing, nothing, nothing, bound_s, 0, step_s=step_s), 1.0)


def test_it_is_taken_where_it_is_faster_or_fits_alone() -> None:
    def found(own: float, hosted: float) -> float:
        made = {OWN: own, HOSTED: hosted}

        def search(choice: Choice, within_s: float, last: bool) -> SearchResult:
            assert 0 < within_s <= 60
            if not made[choice]:
                raise NoPlanFitsError(f"last: {last}")
            return result(made[choice], made[choice] / 2)

        taken = search_choices((OWN, HOSTED), 60.0, search, lambda one: cast("float", one.found.step_s), lambda: False)
        assert taken.found.lower_bound_s == min(s for s in (own, hosted) if s) / 2
        return cast("float", taken.found.step_s)

    assert (found(1.0, 2.0), found(2.0, 1.0), found(0.0, 2.0), found(1.0, 0.0)) == (1.0, 1.0, 2.0, 1.0)
    with pytest.raises(NoPlanFitsError, match="last: True"):
        found(0.0, 0.0)


def test_the_link_is_the_records_or_the_files() -> None:
    assert host_of(H100) == Host(0.8 * 64e9, BANDWIDTH)
    assert host_of(GH200).link_bytes_per_s == 0.8 * 450e9, "NVLink-C2C"
    assert host_of(TOY).link_bytes_per_s == 0.8 * 32e9
    said = replace(TOY, host_link_bytes_per_s=1e9, host_bandwidth_bytes_per_s=2e9, host_memory_bytes=5)
    assert host_of(said) == slowest_host((H100, said)) == Host(1e9, 2e9, 5)


def test_what_a_device_keeps_and_what_a_step_takes() -> None:
    for kept, weight, here, there, updated in ((AS_EMITTED, 4, 8, 16, 28), (MIXED, 2, 6, 16, 4 + 16 + 10)):
        hosted = replace(kept, on_host=True)
        assert (hosted.held_bytes(weight), hosted.host_bytes(weight)) == (here, there)
        assert kept.host_bytes(weight) == 0
        assert hosted.updated_bytes(weight) == kept.updated_bytes(weight) == updated
    device = replace(DEVICE, host_link_bytes_per_s=1e9, host_bandwidth_bytes_per_s=1e10)
    hosted_problem = offloaded(problem(mlp(), Mesh(())), [device])
    param = next(node.type for node in hosted_problem.graph.params)
    assert param.dtype is DType.F32
    found = hosted_problem.optimizer(param, 4e9).mean_s
    assert found == pytest.approx(4 + 2.8 + 4), "gradients, 28 bytes of each of 1e9 elements, weights"


def test_searches_kept_know_it() -> None:
    own = problem(mlp(), Mesh(()))
    keys = {problem_key(one, "backtrack", Budget(), None) for one in (own, offloaded(own, [DEVICE]))}
    assert len(keys) == 2
