"""Gradients at points where a function has no derivative, or torch takes another one: those of the module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ir.evaluation.interpret import evaluate
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.onnx.model import load_onnx
from pdv.frontend.torch.decomposed import decompose, decompositions
from tests.pdv.as_modules import gap_of, plan_for_two

ROWS = torch.tensor([[-1.0, 0, 1, 1, 0, -1], [0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [0.5, -0.5, 3, -3, 6, 0]]).repeat(
    2, 1
)
FLOAT32 = 1e-8  # programs round constants (1e-12) to the model's type, which is float32 here
TARGET = torch.tensor([0.0, 1, 0, 1, 0, 1])

KINKS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda h: torch.maximum(h, h.flip(1)),
    F.logsigmoid,
    lambda h: h.std(-1),
    lambda h: h.clamp(-1, 1),
    F.hardtanh,
    torch.abs,
    F.relu,
    lambda h: h.amax(-1),
)
"""One for each way in which gradients at kinks are written."""


READ: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda h: torch.minimum(h, torch.ones_like(h)),
    lambda h: F.binary_cross_entropy_with_logits(h, TARGET.to(h).expand_as(h), reduction="none"),
    lambda h: F.binary_cross_entropy(h.clamp(0, 1), TARGET.to(h).expand_as(h), reduction="none"),
    F.relu6,
    lambda h: F.elu(h * 1e4),
    lambda h: h.logsumexp(-1),
    lambda h: F.huber_loss(h, TARGET.to(h).expand_as(h), reduction="none"),
    F.hardswish,
    F.hardsigmoid,
    lambda h: F.selu(h * 1e4),
    lambda h: F.celu(h * 1e4, 2.0),
    lambda h: h**0 + h,
    lambda h: torch.stack(torch.var_mean(h, -1), -1),
    lambda h: torch.complex(h, h.flip(1)).abs(),
    lambda h: F.smooth_l1_loss(h * 1e4, TARGET.to(h).expand_as(h), reduction="none", beta=2.0),
    lambda h: h.reshape(-1, 2, 3).amin((1, 2)),
    lambda h: torch.stack([h.norm(p=p, dim=-1) for p in (1.0, 2.0, math.inf)], -1),
    F.normalize,
    lambda h: torch.nan_to_num(h).logcumsumexp(-1),
)
"""Further ones, made of functions that are in ``KINKS``; some have constants, which have seven digits in a program."""


class Kinks(nn.Module):
    """x [b, 6] -> each function of it and a parameter of its own."""

    def __init__(self, kinks: Sequence[Callable[[Tensor], Tensor]] = KINKS) -> None:
        super().__init__()
        self.kinks = kinks
        self.shifts = nn.ParameterList([nn.Parameter(torch.tensor([0.0] * 5 + [1e-30])) for _ in kinks])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(kink(x + shift) for kink, shift in zip(self.kinks, self.shifts, strict=True))


def test_gradients_at_kinks_are_the_modules() -> None:
    module = Kinks()
    plan = plan_for_two(module, [ROWS], {"mesh": {"a": 2}, "techniques": {"a": "ddp"}})
    assert gap_of(plan, module, [ROWS]) < FLOAT32


def test_kinks_are_read_as_they_are() -> None:
    module = Kinks(READ)
    source = copy_of(module, (ROWS,), train=True)
    assert "gradients and state are the same" in check_reading(load_program(module, (ROWS,)).graph, source, train=True)


ENDS = torch.tensor([-1e30, -1e4, -20.0, -6, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 6, 20, 1e4, 1e30], dtype=torch.float64)
OTHERS = torch.tensor([0.0, 1, -1, 2, 0.5, -3, 0, 1, 0, 0.25, 1, 2, 3, 6, 1, 0, 1], dtype=torch.float64)


def test_functions_of_elements_that_torch_takes_apart_keep_their_gradients() -> None:
    wrong = []
    for function, apart in decompositions().items():
        name = str(function)
        if torch.Tag.pointwise not in getattr(function, "tags", ()) or function._schema.is_mutable:
            continue
        if "backward" in name or "mvlgamma" in name or ".clip." in name or "heaviside" in name:
            continue
        pairs = zip_longest(_gradients(apart, function), _gradients(function, function), fillvalue=torch.zeros(()))
        alike = all(torch.allclose(x.double(), y.double(), 1e-6, 1e-6, equal_nan=True) for x, y in pairs)
        wrong += [] if alike else [name]
    assert not wrong


def test_losses_with_margins_stay_whole() -> None:
    exported = torch.export.export(nn.MultiMarginLoss(), (torch.randn(2, 3), torch.tensor([0, 1])))
    assert "aten.multi_margin_loss.default" in {str(node.target) for node in decompose(exported).graph.nodes}


def _gradients(call: Callable[..., Any], function: Any) -> list[Tensor]:  # Any: an operator of torch
    """Value and gradients of a function at ends and ties, as far as it has any; of numbers at one half."""
    tensors: list[Tensor] = []
    given: list[Any] = []
    for argument in function._schema.arguments:
        if argument.has_default_value():
            break
        if str(argument.type) == "Tensor":
            tensors.append((OTHERS if tensors else ENDS).clone().requires_grad_())
        given.append(tensors[-1] if str(argument.type) == "Tensor" else 0.5)
    y = call(*given)
    y = y[0] if isinstance(y, tuple) else y
    found = torch.autograd.grad(y.sum(), tensors, materialize_grads=True) if y.requires_grad else ()
    return [y.detach(), *found]


def _file(operator: str, *ends: float, version: int = 18, **attributes: Any) -> onnx.ModelProto:
    h = onnx.helper
    x, y = (h.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [2, 4]), ("y", None)))
    given = [h.make_tensor(f"end{i}", 1, [], [end]) for i, end in enumerate(ends)]
    nodes = [
        h.make_node("Add", ["x", "w"], ["h"]),
        h.make_node(operator, ["h", *(each.name for each in given)], ["y"], **attributes),
    ]
    weight = onnx.numpy_helper.from_array(np.zeros(4, np.float32), "w")
    return h.make_model(
        h.make_graph(nodes, "g", [x], [y], [weight, *given]), opset_imports=[h.make_opsetid("", version)], ir_version=8
    )


@pytest.mark.parametrize(
    ("operator", "ends", "attributes", "values", "wanted"),
    [
        ("Clip", (0, 6), {}, (0, 6, 3, -1), (0, 0, 1, 0)),  # a ReLU6, in whatever tool
        ("Clip", (-1, 1), {}, (-1, 1, 0, 2), (1, 1, 1, 0)),
        ("Max", (1,), {}, (1, 2, 0, 1), (1, 1, 0, 1)),  # as clamp
        ("HardSigmoid", (), {"alpha": 1 / 6}, (-3, 3, 0, 4), (0, 0, 1 / 6, 0)),
        ("HardSwish", (), {}, (-3, 3, 0, 4), (0, 1, 0.5, 1)),
        ("Elu", (), {"alpha": 2.0}, (1e4, 0, -1e4, 1), (1, 2, 0, 1)),
        ("Celu", (), {"alpha": 2.0}, (1e4, 0, -1e4, 1), (1, 1, 0, 1)),
        ("Selu", (), {"alpha": 1.0, "gamma": 2.0}, (1e4, 0, -1e4, 1), (2, 2, 0, 2)),
        ("ReduceL2", (), {"keepdims": 0}, (0, 0, 0, 0), (0, 0, 0, 0)),
        ("ReduceLogSumExp", (), {"keepdims": 0}, (1e3, 1e3, 0, 0), (0.5, 0.5, 0, 0)),
    ],
)
def test_gradients_of_files_at_kinks_are_torchs(
    operator: str, ends: Sequence[float], attributes: dict[str, Any], values: Sequence[float], wanted: Sequence[float],
    tmp_path: Path,
) -> None:  # fmt: skip
    onnx.save(_file(operator, *ends, **attributes), tmp_path / "model.onnx")
    graph = load_onnx(tmp_path / "model.onnx").graph
    evaluation = evaluate(graph, {"x": np.zeros((2, 4)), "w": np.array(values, np.float64)})
    ((name, output),) = graph.outputs
    gradients = evaluation.gradients({name: np.ones(output.type.shape)})
    rows = 1 if operator.startswith("Reduce") else 2
    assert np.allclose(evaluation.whole_gradient(graph.params[0], gradients), rows * np.array(wanted), rtol=1e-6)
