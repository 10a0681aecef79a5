"""What a finished graph costs, on programs small enough to count by hand."""

from __future__ import annotations

import pytest

from ir.builder import Builder
from ir.graph import Graph
from ir.mesh import Mesh
from ir.ops.batch_norm import channel_mean, channel_variance
from pdv.cost.comm import AxisLink, all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from pdv.pcg.plan_cost import is_residual, plan_cost
from tests.pdv.worlds import FAST, f32, problem

MESH = Mesh.of(a=2)
AXIS = AxisLink(2, FAST)


def product(stored: str = "", *, regather: bool = False) -> Graph:
    """x w over samples: x [8, 4] cut, w [6, 4] whole or gathered."""
    k = Builder()
    x = k.partition(k.input("x", f32(8, 4)), dim=0, axis="a")
    w = k.param("w", f32(6, 4), stored=stored, regather=regather)
    w = k.all_gather(w, dim=0, axis="a") if stored else k.replicate(w, axis="a")
    return k.graph({"y": k.linear(x, w)})


def test_data_parallel_is_an_all_reduce_of_gradients() -> None:
    pcg = product()
    cost = plan_cost(problem(pcg, MESH), pcg)
    assert cost.communication_s == all_reduce_seconds(AXIS, 96)
    assert cost.memory == {
        "weights": 96 + 128,  # w, and x, which is whole on every device
        "gradients": 96,
        "optimizer": 192,
        "activations": 0,  # a slice of an input is no copy
        "transient": 64 + 96 + 96,
    }
    assert cost.peak_bytes == cost.memory_bytes + 256


def test_a_cut_weight_is_gathered_and_its_gradient_scattered() -> None:
    pcg = product("S0")
    cost = plan_cost(problem(pcg, MESH), pcg)
    assert cost.communication_s == all_gather_seconds(AXIS, 96) + reduce_scatter_seconds(AXIS, 96)
    assert (cost.memory["weights"], cost.memory["gradients"], cost.memory["optimizer"]) == (48 + 128, 48, 96)
    assert cost.memory["activations"] == 96, "the gathered copy is kept for backward"


def test_gathering_again_trades_time_for_memory() -> None:
    kept, again = product("S0"), product("S0", regather=True)
    one, other = (plan_cost(problem(pcg, MESH), pcg) for pcg in (kept, again))
    assert other.communication_s == one.communication_s + all_gather_seconds(AXIS, 96)
    assert other.memory["activations"] == 0


def test_inference_has_no_gradients_and_no_optimizer() -> None:
    pcg = product("S0")
    cost = plan_cost(problem(pcg, MESH, mode="infer"), pcg)
    assert cost.communication_s == all_gather_seconds(AXIS, 96)
    assert cost.optimizer_s == 0.0
    assert set(cost.memory) == {"weights", "activations", "transient"}
    assert cost.memory["activations"] == 0


def test_a_value_that_several_keep_counts_once() -> None:
    k = Builder()
    h = k.linear(k.input("x", f32(8, 4)), k.param("w", f32(6, 4)))
    pcg = k.graph({"y": k.add(k.exp(h), k.add(k.gelu(h), k.log(h)))})
    cost = plan_cost(problem(pcg, MESH), pcg)
    assert cost.memory["activations"] == 2 * 8 * 6 * 4, "h once, and what exp gives"


def test_replicate_makes_no_copy() -> None:
    k = Builder()
    h = k.relu(k.linear(k.input("x", f32(8, 4)), k.param("w", f32(6, 4))))
    w = k.partition(k.param("v", f32(2, 6)), dim=0, axis="a")
    y = k.combine(k.linear(k.replicate(h, axis="a"), w), dim=1, axis="a")
    pcg = k.graph({"y": y})
    assert plan_cost(problem(pcg, MESH), pcg).memory["activations"] == 8 * 6 * 4


def test_parts_add_up() -> None:
    pcg = product("S0")
    cost = plan_cost(problem(pcg, MESH), pcg)
    nodes = sum(entry.forward_s + entry.backward_s for entry in cost.nodes.values())
    assert nodes + cost.optimizer_s == pytest.approx(cost.seconds)
    assert cost.std_s > 0


def test_a_norm_of_a_batch_takes_its_statistics_itself() -> None:
    """Of points that are all on one device; where ranks hold parts, each computes its own terms of them."""
    seconds = []
    for cut in (False, True):
        k = Builder()
        image = k.input("x", f32(8, 4, 6, 6))
        x = k.partition(image, dim=0, axis="a") if cut else image
        mean = k.apply(channel_mean, (x,), {})
        variance = k.apply(channel_variance, (x, k.replicate(k.reduce(mean, axis="a"), axis="a") if cut else mean), {})
        pcg = k.graph({"mean": mean, "variance": variance})
        cost = plan_cost(problem(pcg, MESH), pcg)
        seconds.append([cost.nodes[node].forward_s for node in (mean, variance)])
    assert seconds[0] == [0.0, 0.0]
    assert min(seconds[1]) > 0.0


def test_a_residual_is_a_sum_of_two_activations() -> None:
    """Simulated seconds and bytes of dropout ask the same function."""
    k = Builder()
    x, w = k.input("x", f32(4, 8)), k.param("w", f32(4, 8))
    y = k.tanh(x)
    assert is_residual(k.add(y, k.tanh(y)))
    assert not is_residual(k.add(y, w))
    assert not is_residual(k.mul(y, k.tanh(y)))
