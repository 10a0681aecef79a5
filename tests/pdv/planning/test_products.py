"""Formats of products: which are fixed, allowed or refused; one is taken where it is faster, and by what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest

from ir.builder import Builder
from ir.errors import UsageError
from ir.graph import Graph
from ir.mesh import Axis, Mesh
from ir.types import DType, TensorType
from pdv.cluster import Device
from pdv.config import Mode
from pdv.cost.comm import AxisLink, move_seconds
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import program
from pdv.pcg.plan_cost import local_costs
from pdv.pipelines.pinned import FREE, Pinned
from pdv.planning.choices import Choice, search_choices
from pdv.planning.products import read_formats
from pdv.planning.search import SearchResult
from pdv.problem.formats import Products
from tests.pdv.worlds import FAST, problem

H100, A100, TOY = (
    Device(name, 80 << 30, {"float32": 6e13, "bfloat16": 9e14}, 3e12, 4e-6, 0.7)
    for name in ("h100-80gb-sxm", "a100-80gb-sxm", "toy")
)
NARROW, WIDE = 512, 16384


def made(width: int = NARROW, dtype: DType = DType.BF16) -> Graph:
    """A model of two layers, without weights."""
    return program(arch(f"gpt:layers=2,hidden={width},heads=4,seq=1024,vocab=3000"), 8, dtype).graph


def formats(
    products: str = "own",
    allow: tuple[str, ...] = (),
    mode: Mode = "train",
    pinned: Pinned = FREE,
    graph: Graph | None = None,
    devices: tuple[Device, ...] = (H100,),
) -> list[str]:
    """Their names."""
    found = read_formats(products, allow, mode, pinned, graph or made(), devices)
    return ["own" if one is None else one.format.name for one in found]


def test_nothing_narrow_is_looked_at_unasked() -> None:
    assert formats() == ["own"]
    assert formats(allow=("fp8",)) == ["own", "fp8", "fp8-rowwise"]
    assert formats("fp8-rowwise") == ["fp8-rowwise"]


def test_what_is_allowed_is_left_out_where_nothing_multiplies_so() -> None:
    for device in (A100, TOY):
        assert formats(allow=("fp8",), devices=(H100, device)) == ["own"]
    assert len(formats(allow=("fp8",), devices=(replace(TOY, peak_flops={"float32": 1.0, "float8": 2.0}),))) == 3
    assert formats(allow=("fp8",), mode="infer") == ["own"]
    assert formats(allow=("fp8",), pinned=Pinned(schedule="zbv")) == ["own"]
    assert formats(allow=("fp8",), graph=made(dtype=DType.F32)) == ["own"]


def test_what_does_not_go_is_refused() -> None:
    with pytest.raises(UsageError, match="no program is emitted with products in 'nvfp4'"):
        formats("nvfp4")
    with pytest.raises(UsageError, match="no program is emitted with products in 'fp4'"):
        formats(allow=("fp4",))
    with pytest.raises(UsageError, match="products are fixed to 'fp8', and fp8 allowed"):
        formats("fp8", ("fp8",))
    with pytest.raises(UsageError, match="with inference"):
        formats("fp8", mode="infer")
    with pytest.raises(UsageError, match="backward runs in halves"):
        formats("fp8", pinned=Pinned(schedule="zero-bubble"))
    with pytest.raises(UsageError, match="multiplies by a trained matrix in bfloat16"):
        formats("fp8", graph=made(dtype=DType.F32))
    with pytest.raises(UsageError, match="a100-80gb-sxm has no units for fp8"):
        formats("fp8", devices=(H100, A100))


def seconds(width: int, products: Products | None, loop: str | None = None) -> tuple[float, float]:
    """Of all products with weights on four devices, cut along a loop if one is given; and of the head alone."""
    mesh = Mesh((Axis("tp", 4),))
    asked = replace(problem(made(width), mesh, device=H100), axes=(AxisLink(4, FAST),), products=products)
    nodes = [node for node in asked.graph.nodes if node.op.weight_waits]
    ways = [[next(split for split in node.op.splits(node.loops) if split.loop == loop)] for node in nodes]
    costs = [cost.seconds for cost in local_costs(asked, list(zip(nodes, ways, strict=True)))]
    return sum(costs), costs[-1]


def test_casts_cost_more_than_they_bring_where_matrices_are_small() -> None:
    for name in ("fp8", "fp8-rowwise"):
        for width, gains in ((NARROW, False), (WIDE, True)):
            (chosen,) = read_formats(name, (), "train", FREE, made(width), (H100,))
            (own, own_head), (narrow, head) = seconds(width, None), seconds(width, chosen)
            assert (narrow < own) == gains, (name, width, narrow / own)
            assert head == own_head


def test_one_scale_of_a_matrix_that_is_cut_is_a_sum_over_ranks() -> None:
    by_tensor, by_rows = (read_formats(name, (), "train", FREE, made(), (H100,))[0] for name in ("fp8", "fp8-rowwise"))
    for loop, sums in (("n", 3), ("k", 4)):
        apart = seconds(NARROW, by_tensor, loop)[0] - seconds(NARROW, by_rows, loop)[0]
        whole = seconds(NARROW, by_tensor)[0] - seconds(NARROW, by_rows)[0]
        assert apart == pytest.approx(whole + 8 * sums * sum_s(), rel=1e-6)


def test_a_factor_whose_matrix_is_not_trained_has_no_scale_to_agree_on() -> None:
    """Its product is in the wide type, so that nothing is cast."""
    by_tensor = read_formats("fp8", (), "train", FREE, made(), (H100,))[0]
    mesh = Mesh((Axis("tp", 4),))
    k = Builder()
    matrix = k.param("h.0.w", TensorType((256, 256), DType.BF16), trainable=False)
    x = k.linear(k.param("bias", TensorType((8, 256), DType.BF16)), matrix)
    asked = replace(problem(k.graph({"y": x}, name="frozen"), mesh, device=H100), axes=(AxisLink(4, FAST),))
    ways = [next(split for split in x.op.splits(x.loops) if split.loop == "k")]
    one, other = (local_costs(replace(asked, products=each), [(x, ways)])[0] for each in (None, by_tensor))
    assert one == other


def test_formats_share_the_budget_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []
    monkeypatch.setattr("time.thread_time", lambda: now[0])

    def search(chosen: Choice, within_s: float, last: bool) -> SearchResult:
        assert not last, "one was found"
        given.append(within_s)
        now[0] += min(within_s, 2.0) if chosen.products is None else within_s
        return cast(SearchResult, SimpleNamespace(found=BEST, seconds=1.0))

    names = ("fp8", "fp8-rowwise")
    chosen = [Choice(read_formats(name, (), "train", FREE, made(), (H100,))[0]) for name in names]
    assert (
        search_choices([Choice(None), *chosen], 12.0, search, lambda _: 1.0, lambda: False).found.lower_bound_s == 3.0
    )
    assert given == [4.0, 5.0, 5.0]
    assert now == [12.0]
    assert search_choices([chosen[0], *chosen], 0.0, search, lambda _: 1.0, lambda: False).found.lower_bound_s == 0.0
    assert len(given) == 4, "nothing was left for the others, so that nothing is certified"


@dataclass(frozen=True)
class Best:
    """What a search gives, as far as it is read."""

    lower_bound_s: float


BEST = Best(3.0)


def sum_s() -> float:
    """Of four bytes over four ranks."""
    return move_seconds("reduce", AxisLink(4, FAST), 4)[0]
