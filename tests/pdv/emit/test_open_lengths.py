"""Emitted programs at other lengths than the planned one: as the module, wherever it leaves its length open."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from benchmarks.measured.parity import load_package
from ir.errors import ModelError, UsageError
from ir.mesh import Mesh
from pdv.emit.package import emit_package
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from pdv.frontend.program import Program
from pdv.planning.sizes import sizes_document

B, S, D, ROWS = 3, 6, 8, 20
F = nn.functional


class Part(nn.Module):
    """A function of [b, s, D] with the parameters that some of them take."""

    def __init__(self, function: Callable[[Part, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear, self.table = nn.Linear(D, D), nn.Embedding(ROWS, D)
        self.token = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def positions(part: Part, x: Tensor) -> Tensor:
    found: Tensor = x + part.table(torch.arange(x.size(1)))
    return found


def behind_a_token(part: Part, x: Tensor) -> Tensor:
    x = torch.cat((part.token.expand(x.size(0), 1, D), x), 1)
    found: Tensor = x + part.table(torch.arange(x.size(1)))
    return found


def angles(part: Part, x: Tensor) -> Tensor:
    turn = torch.outer(torch.arange(x.size(1)).float(), 0.5 ** torch.arange(D // 2))
    turn = torch.cat((turn, turn), -1)
    return x * turn.cos() + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * turn.sin()


def mask(part: Part, x: Tensor) -> Tensor:
    """What is near: no causal mask, which attention has a flag for."""
    places = torch.arange(x.size(1))
    near = (places[:, None] - places).abs() < 3
    q = x.view(*x.shape[:2], 2, D // 2).transpose(1, 2)
    found: Tensor = F.scaled_dot_product_attention(q, q, q, attn_mask=near)
    return found.transpose(1, 2).flatten(2)


def merged(part: Part, x: Tensor) -> Tensor:
    found: Tensor = part.linear(x.flatten(0, 1)).tanh()
    return found.view(x.shape)


def mean(part: Part, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def of_the_rows(part: Part, x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).softmax(-1).view(x.size(1), x.size(0), D).transpose(0, 1)


OPEN = (positions, behind_a_token, angles, mask, merged, mean, of_the_rows)
MOST = {"positions": ROWS, "behind_a_token": ROWS - 1, "angles": 16 * S, "mask": 16 * S}


def loaded(module: nn.Module, **options: Any) -> Program:
    most = MOST.get(module.function.__name__) if isinstance(module, Part) else None
    shapes = {"x": {0: Dim("rows"), 1: Dim("length", max=most)}}
    return load_program(module.eval(), (torch.randn(B, S, D),), dynamic_shapes=shapes, **options)


def emitted(program: Program, folder: Path, mode: str = "train") -> tuple[Any, str]:
    """The package of a plan for one device, and its text."""
    folder.mkdir()
    document = {"mode": mode, "sizes": sizes_document(program)}
    emit_package(program.graph, Mesh.of(dp=1), document, program.weights, folder)
    return load_package(folder).build(device="cpu"), (folder / "model.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("function", OPEN, ids=lambda function: function.__name__)
def test_any_length(function: Callable[[Part, Tensor], Tensor], tmp_path: Path) -> None:
    module = Part(function)
    model, text = emitted(loaded(module), tmp_path / "length_pdv")
    assert "length is the size of dim 1 of x" in text.replace("\n    ", " ")
    check_lengths(module, model)
    most = MOST.get(function.__name__)
    if most is not None:
        assert f"at most {most}" in text.replace("\n    ", " ")
        with pytest.raises(ValueError, match=rf"wrong-size: length = {most + 1} .* up to {most}\."):
            model(torch.randn(B, most + 1, D))


def check_lengths(module: nn.Module, model: Any) -> None:
    for rows, length in ((B, S), (B, 2 * S), (2 * B, S // 2), (1, S + 1), (2, 1), (B, 19)):
        x = torch.randn(rows, length, D, requires_grad=True)
        (wanted := module(x)).square().sum().backward()
        found, x.grad = x.grad, None
        model.zero_grad()
        torch.testing.assert_close(y := model(x), wanted)
        y.square().sum().backward()
        torch.testing.assert_close(x.grad, found)
        for name, gradient in model.full_gradients().items():
            torch.testing.assert_close(gradient, module.get_parameter(name).grad)
        module.zero_grad()


@pytest.mark.parametrize("function", [positions, angles, mask, merged], ids=lambda function: function.__name__)
def test_any_length_through_onnx(function: Callable[[Part, Tensor], Tensor], tmp_path: Path) -> None:
    module, file = Part(function).eval(), tmp_path / "m.onnx"
    shapes = ({0: Dim("batch"), 1: Dim("length", max=MOST.get(function.__name__))},)
    export_onnx(module, (torch.randn(B, S, D),), file, dynamic_shapes=shapes)
    program = load_program(file, batch=B, dims={"length": S})
    check_lengths(module, emitted(program, tmp_path / "length_pdv")[0])


def test_exported_programs_say_themselves_what_is_open(tmp_path: Path) -> None:
    module, shapes = Part(positions).eval(), {"x": {0: Dim("rows"), 1: Dim("length", max=ROWS)}}
    exported = torch.export.export(module, (torch.randn(B, S, D),), dynamic_shapes=shapes)
    model, text = emitted(load_program(exported), tmp_path / "exported_pdv")
    assert "x [b, s, 8] -> [b, s, 8]" in text
    check_lengths(module, model)
    model, text = emitted(load_program(exported, dims={"s": 4}), tmp_path / "shorter_pdv")
    check_lengths(module, model)


def test_tables_are_not_folded_into_weights_for_inference(tmp_path: Path) -> None:
    module = Part(positions)
    model, text = emitted(loaded(module), tmp_path / "infer_pdv", "infer")
    assert "F.embedding(self.table_ids[: x.size(1)], local(self.table_weight))" in text
    x = torch.randn(2, 2 * S, D)
    torch.testing.assert_close(model(x), module(x))


def test_lengths_of_several_inputs(tmp_path: Path) -> None:
    class Cross(nn.Module):
        def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
            scores = x @ memory.transpose(1, 2) + bias
            return scores.softmax(-1) @ memory

    length, size = Dim("length"), Dim("size")
    shapes = {"x": {0: Dim("rows"), 1: length}, "memory": {0: Dim("rows"), 1: size}, "bias": {0: length, 1: size}}
    inputs = (torch.randn(B, S, D), torch.randn(B, S, D), torch.randn(S, S))
    program = load_program(Cross(), inputs, dynamic_shapes=shapes)
    model, text = emitted(program, tmp_path / "cross_pdv")
    assert "bias [length, size]" in text
    for rows, n, m in ((B, S, S), (2, 5, 7), (1, 12, 3)):
        x = torch.randn(rows, n, D), torch.randn(rows, m, D), torch.randn(n, m)
        torch.testing.assert_close(model(*x), Cross()(*x))
    with pytest.raises(ValueError, match=r"input bias has shape \[5, 6\]. This program takes \[length, size\], and"):
        model(torch.randn(2, 5, D), torch.randn(2, 7, D), torch.randn(5, 6))


def reversed_positions(part: Part, x: Tensor) -> Tensor:
    found: Tensor = x + part.table(torch.arange(x.size(1)).flip(0))
    return found


FIXED: list[tuple[Callable[[Part, Tensor], Tensor], str]] = [
    (lambda part, x: x * x.size(1), r"for length = 6: at length = 12 the model takes scale mul"),
    (reversed_positions, r"for length = 6: a constant of shape \[\d?,? ?6\] has 6 there"),
]


@pytest.mark.parametrize(("function", "reason"), FIXED, ids=["factor", "reversed"])
def test_a_fixed_length_is_told_and_checked(
    function: Callable[[Part, Tensor], Tensor], reason: str, tmp_path: Path
) -> None:
    module = Part(function)
    model, text = emitted(loaded(module), tmp_path / "fixed_pdv")
    assert re.search(reason, text.replace("\n    ", " ")), text
    x = torch.randn(2 * B, S, D)
    torch.testing.assert_close(model(x), module(x))
    with pytest.raises(ValueError, match=r"wrong-size: .*\[3, 7, 8\]. This program takes \[b, 6, 8\]"):
        model(torch.randn(B, S + 1, D))


def test_a_length_that_the_model_fixes_is_said_by_torch() -> None:
    with pytest.raises(ModelError, match=re.escape("torch suggests: length = Dim('length', max=20)")):
        load_program(
            Part(lambda part, x: x + part.table.weight[: x.size(1)]), (torch.randn(B, S, D),),
            dynamic_shapes={"x": {0: Dim("rows"), 1: Dim("length")}},
        )  # fmt: skip


def test_sizes_that_nobody_gave_are_named(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    export_onnx(Part(mean).eval(), (torch.randn(B, S, D),), file, dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},))
    with pytest.raises(ModelError, match=r"length \(dim 1 of x\).*--dim length=N \(from Python"):
        load_program(file, batch=B)
    with pytest.raises(UsageError, match=r"no open size called 'lenght'. Open sizes: batch, length"):
        load_program(file, batch=B, dims={"length": S, "lenght": S})
    with pytest.raises(UsageError, match=r"no open size called 'lenght'. Open sizes: rows, length"):
        loaded(Part(mean), dims={"lenght": S})
