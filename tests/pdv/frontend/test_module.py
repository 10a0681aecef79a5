"""Plain modules: layers of torch itself through either frontend, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import ModelError, UnsupportedOperatorsError, UsageError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.frontend import Program, load_program
from pdv.frontend.onnx.export import export_onnx
from pdv.frontend.torch.opaque import call_torch
from pdv.plan.package import import_package
from pdv.planning.sizes import sizes_document
from tests.pdv.worlds import cluster


class Function(nn.Module):
    """A module without weights."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Tied(nn.Module):
    """A weight that is an embedding, a head, and (transposed) a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(ids))
        return logits @ self.table.weight


class SelfAttention(nn.Module):
    """Attention written out, with a mask built on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) / 2
        hidden = torch.triu(torch.full((s, s), float("-inf")), 1)
        return torch.flatten((torch.softmax(scores + hidden, -1) @ v).transpose(1, 2), 2)


class Again(nn.Module):
    """A norm that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        for parameter in self.norm.parameters():
            nn.init.uniform_(parameter)  # of equal numbers an exporter may make one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.norm(x).relu())
        return y


class Drawn(nn.Sequential):
    """A module, its parameters no two of which are equal."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for parameter in self.parameters():
            nn.init.uniform_(parameter)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear without bias": (lambda: nn.Linear(8, 4, bias=False), (2, 3, 8)),
    "conv, grouped and strided": (lambda: nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4), (2, 8, 9, 9)),
    "batch norm, training": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
    "batch norm over rows": (lambda: nn.BatchNorm1d(8), (4, 8)),
    "batch norm over sequences": (lambda: nn.BatchNorm1d(8), (4, 8, 3)),
    "batch norm over volumes": (lambda: nn.BatchNorm3d(8), (4, 8, 3, 1, 2)),
    "batch norm, twice": (Again, (4, 8)),
    "batch norm, inference": (lambda: nn.BatchNorm2d(8).eval(), (4, 8, 3, 3)),
    "average pool": (lambda: nn.AvgPool2d(2), (2, 3, 8, 8)),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d((2, 4)), (2, 3, 8, 8)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 8, 8)),
    "max pool, rounding up without a rest": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), (2, 3, 7, 9)),
    "average pool, padded": (lambda: nn.AvgPool2d(3, 1, 1), (2, 3, 6, 5)),
    "convolution of one by seven": (lambda: nn.Conv2d(4, 4, (1, 7), padding=(0, 3)), (2, 4, 5, 9)),
    "elements by number": (lambda: Function(lambda x: x.index_select(1, torch.tensor([0, 2, 1, 0]))), (2, 3, 4)),
    "neighbours by number": (lambda: Function(lambda x: x.index_select(1, torch.tensor([1, 2]))), (2, 3, 4)),
    "two largest": (
        lambda: Function(lambda x: torch.zeros_like(x).scatter(-1, x.topk(2).indices, x.topk(2).values)),
        (3, 4, 5),
    ),
    "rms norm": (lambda: nn.RMSNorm(8, eps=1e-6), (2, 3, 8)),
    "layer norm without weights": (lambda: nn.LayerNorm(8, elementwise_affine=False), (2, 3, 8)),
    "layer norm over several dims": (lambda: Drawn(nn.LayerNorm((3, 8))), (2, 4, 3, 8)),
    "layer norm over several dims, without bias": (lambda: Drawn(nn.LayerNorm((4, 3, 8), bias=False)), (2, 4, 3, 8)),
    "layer norm over several dims, without weights": (
        lambda: nn.LayerNorm((3, 8), elementwise_affine=False),
        (2, 3, 8),
    ),
    "rms norm over several dims": (lambda: Drawn(nn.RMSNorm((3, 8), eps=1e-6)), (2, 3, 8)),
    "gelu, tanh": (lambda: nn.GELU("tanh"), (2, 8)),
    "softmax of an inner dim": (lambda: nn.Softmax(1), (2, 3, 4)),
    "attention written out": (SelfAttention, (2, 5, 8)),
    "arithmetic": (lambda: Function(lambda x: (1 - x) * 2 / (x.pow(2).sum(-1, keepdim=True) + 1) - x / 3), (2, 5)),
    "split, stack, squeeze": (
        lambda: Function(lambda x: torch.stack(x.split([2, 1, 3], -1)[0::2][:1], 1).squeeze(1) + x[..., 1:3]),
        (2, 6),
    ),
    "every second element": (lambda: Function(lambda x: x[:, 1::2] * x[:, ::2]), (3, 6)),
    "where": (lambda: Function(lambda x: x.masked_fill(torch.arange(4) > 1, 0.5)), (3, 4)),
    "grouped attention": (
        lambda: Function(lambda x: functional.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], enable_gqa=True)),
        (2, 4, 5, 8),
    ),
}


def run(program: Program, *inputs: torch.Tensor) -> np.ndarray:
    values = {name: program.weights.load(name) for name in program.weights.names}
    values |= {node.attr("name"): x.numpy() for node, x in zip(program.graph.inputs, inputs, strict=True)}
    result: np.ndarray = evaluate(program.graph, values, field=FloatField(foreign=call_torch)).gather()["output"]
    return result


@pytest.mark.parametrize("name", MODULES)
def test_module_equals_torch(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    assert np.allclose(run(load_program(module, x), x), module(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODULES if "over several dims" in name])
def test_a_norm_over_several_dims_is_cut_as_one_over_one(name: str) -> None:
    make, shape = MODULES[name]
    program = load_program(make(), (torch.randn(shape),))
    (norm,) = (node for node in program.graph.nodes if node.op.name in ("layer_norm", "rms_norm", "opaque"))
    assert norm.op.name in name.replace(" ", "_")
    assert norm.type.shape[0] == shape[0]


def test_an_rms_norm_of_doubles_has_their_eps() -> None:
    module, x = nn.RMSNorm(8).double(), 1e-4 * torch.randn(2, 3, 8, dtype=torch.float64)
    assert np.allclose(run(load_program(module, x), x), module(x).detach().numpy(), atol=1e-9)


def test_a_norm_applied_again_moves_its_statistics_on() -> None:
    torch.manual_seed(0)
    module, x = Again(), torch.randn(4, 8)
    program = load_program(module, x)
    values = {name: program.weights.load(name) for name in program.weights.names}
    values |= {node.attr("name"): x.numpy() for node in program.graph.inputs}
    found = evaluate(program.graph, values, field=FloatField(foreign=call_torch)).gather()
    module(x)
    for name in ("norm.running_mean", "norm.running_var"):
        assert np.allclose(found[f"update:{name}"], module.get_buffer(name).numpy(), atol=1e-6)


def test_modules_are_the_same_through_onnx(tmp_path: Path) -> None:
    class Everything(nn.Module):
        """All modules side by side: one export instead of twenty."""

        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(make() for make, _ in MODULES.values())

        def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(member(x) for member, x in zip(self.members, xs, strict=True))

    inputs = tuple(torch.randn(shape) for _, shape in MODULES.values())
    module = Everything()
    export_onnx(module, inputs, tmp_path / "m.onnx")
    expected, found = load_program(module, inputs).graph, load_program(tmp_path / "m.onnx").graph
    outputs = zip(MODULES, expected.outputs, found.outputs, strict=True)
    assert {name: x.digest == y.digest for name, (_, x), (_, y) in outputs} == dict.fromkeys(MODULES, True)


def test_weights_that_the_exporter_merged_are_apart_again(tmp_path: Path) -> None:
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    x = torch.randn(2, 4)
    export_onnx(module, (x,), tmp_path / "good.onnx")
    assert len(load_program(tmp_path / "good.onnx").graph.params) == 6
    merged = torch.onnx.export(module, (x,), dynamo=True, verbose=False)
    assert merged is not None
    merged.save(tmp_path / "merged.onnx")
    program = load_program(tmp_path / "merged.onnx")
    assert len(program.graph.params) == 6
    assert "merges equal weights" in " ".join(program.notes)


def test_tied_weights_stay_one_stored_tensor() -> None:
    ids = torch.arange(10).reshape(2, 5)
    module = Tied()
    program = load_program(module, ids)
    assert len(program.weights.names) == 1
    assert {node.attr("source") for node in program.graph.params} == set(program.weights.names)
    assert np.allclose(run(program, ids), module(ids).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "function", [lambda x: x[:, [0, 2, -1, 0]] + x[:, 1:2], lambda x: x[:, [1, 2, 2], [0, 0, 1]]], ids=["one", "two"]
)
def test_indices_are_elements_by_number(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(2, 3, 3)
    program = load_program(Function(function), x)
    assert "index_select" in {node.op.name for node in program.graph.nodes}
    assert np.array_equal(run(program, x), function(x).double().numpy())


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_one_size_are_sums_of_rows(mode: str) -> None:
    bags, ids = nn.EmbeddingBag(10, 4, mode=mode), torch.randint(0, 10, (6, 3))
    assert np.allclose(run(load_program(bags, ids), ids), bags(ids).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.topk(2).values, r"topk.*\(only scatter"),
        (lambda x: x.topk(2).values + 1, r"topk.*\(only scatter"),
        (
            lambda x: torch.ones(1, 2, 6, 6).scatter(-1, x.topk(2).indices, x.topk(2).values),
            "anything but zeros",
        ),
        (lambda x: functional.max_pool2d(x, 3, 2, ceil_mode=True), "leave a rest of 6"),
    ],
    ids=["largest alone", "largest used", "scattered into ones", "rounding up"],
)
def test_what_has_no_declaration_is_opaque(function: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    x = torch.randn(1, 2, 6, 6)
    program = load_program(Function(function), x)
    assert any(re.search(reason, text) for text in program.opaque)
    assert np.allclose(run(program, x), function(x).double().numpy(), atol=1e-6)


def test_bfloat16_weights_keep_their_bits() -> None:
    module = nn.Linear(4, 4).to(torch.bfloat16)
    program = load_program(module, torch.randn(2, 4, dtype=torch.bfloat16))
    stored = program.weights.load("weight")
    assert stored.dtype.name == "bfloat16"
    assert np.array_equal(stored.astype("f"), module.weight.detach().float().numpy())


def test_batch_resizes_example_inputs() -> None:
    program = load_program(nn.Linear(4, 4), torch.randn(2, 4), batch=6)
    assert program.graph.inputs[0].type.shape == (6, 4)


def test_meta_module_is_planned_and_has_no_values() -> None:
    with torch.device("meta"):
        module, x = nn.Linear(4, 4), torch.randn(2, 4)
    program = load_program(module, x)
    with pytest.raises(ModelError, match="'weight' is on the meta device"):
        program.weights.load("weight")


def test_every_unsupported_operator_is_listed_with_its_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cumprod(x, 0) + torch.randperm(3)

    with pytest.raises(UnsupportedOperatorsError) as caught:
        load_program(Function(function), torch.randn(3))
    assert [operator.split(" at ")[0] for operator in caught.value.operators] == ["aten.randperm.default"]
    program = load_program(Function(lambda x: torch.erfinv(torch.cumprod(x, 0))), torch.randn(3))
    assert [text.split(" at ")[0] for text in program.opaque] == ["aten.cumprod.default", "aten.erfinv.default"]
    assert all("test_module.py:" in text for text in (*caught.value.operators, *program.opaque))


def test_two_dropouts_of_one_value_have_masks_of_their_own() -> None:
    class Sum(nn.Module):
        def __init__(self, *values: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.values = values

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([F.dropout(value(x), 0.5, self.training) for value in self.values]).sum(0)

    program = load_program(Sum(torch.clone, torch.clone, torch.clone), torch.randn(3))
    assert len({node for node in program.graph.nodes if node.op.draws}) == 3
    with pytest.raises(ModelError, match="two values that are equal"):
        load_program(Sum(torch.clone, lambda x: x[None][0]), torch.randn(3))


def test_dropout_is_read_in_training_alone() -> None:
    assert load_program(nn.Dropout(0.5), torch.randn(3)).graph.draws == 1
    assert len(load_program(nn.Dropout(0.5).eval(), torch.randn(3)).graph.nodes) == 1


def test_untraceable_module_is_one_error() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(ModelError, match="Function cannot be exported"):
        load_program(Function(function), torch.randn(3))


def test_usage_errors() -> None:
    exported = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    assert load_program(exported).graph.inputs[0].type.shape == (2, 4)
    with pytest.raises(UsageError, match="own inputs"):
        load_program(exported, torch.randn(2, 4))
    with pytest.raises(UsageError, match="without example_inputs"):
        load_program(nn.Linear(4, 4))


def test_exported_programs_with_dynamic_shapes_are_planned_at_their_examples() -> None:
    dynamic = torch.export.export(
        nn.Linear(4, 4), (torch.randn(2, 4),), dynamic_shapes={"input": {0: torch.export.Dim("batch", max=64)}}
    )
    loaded = load_program(dynamic)
    assert loaded.graph.inputs[0].type.shape == (2, 4)
    assert sizes_document(loaded) == {"b": {"inputs": [["input", 0]], "fixed_by": "", "most": 64}}
    assert load_program(dynamic, batch=6).graph.inputs[0].type.shape == (6, 4)
    fixed = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(UsageError, match="Export it at this batch, or with dynamic_shapes"):
        load_program(fixed, batch=6)


def test_numbers_of_a_module_in_float64_are_not_rounded() -> None:
    module = Function(lambda x: (x * 0.1 + 1.7) / 3)
    x = torch.randn(3, 4, dtype=torch.float64)
    program = load_program(module, x)
    found = evaluate(program.graph, {program.graph.inputs[0].attr("name"): x.numpy()}).gather()["output"]
    assert np.allclose(found, module(x).numpy(), rtol=1e-14, atol=0)


def test_what_forward_leaves_in_a_module_is_not_left_in_the_users() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if not hasattr(self, "scale"):
                self.register_buffer("scale", torch.ones(3))
            return self.linear(x) * self.scale

    module = Lazy()
    names = set(module.state_dict())
    load_program(module, (torch.randn(4, 3),))
    assert (set(module.state_dict()), module.calls) == (names, 0)


def test_integers_are_computed_as_integers(tmp_path: Path) -> None:
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 4)

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.table(ids), 1 - ids, ids * 2 + 3, ids.sum(-1)

    module, ids = Ids(), torch.randint(0, 4, (4, 3))
    plan = pdv.optimize(module, (ids,), cluster=cluster(2))
    plan.save(tmp_path / "counted_ids")
    for found, wanted in zip(import_package(tmp_path / "counted_ids").build("cpu")(ids), module(ids), strict=True):
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)


class Rejoined(nn.Module):
    """A value taken apart and put together again, which a law sees is that value: nothing is left of the block."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6) if behind else nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        found: torch.Tensor = self.down(torch.cat([y[..., :1], y[..., 1:]], -1))
        return found


@pytest.mark.parametrize("behind", [True, False])
def test_a_block_of_which_nothing_is_left_is_planned(behind: bool) -> None:
    assert pdv.optimize(Rejoined(behind), torch.randn(4, 3, 6), cluster=cluster(2), pipelines="never").pcg.outputs
