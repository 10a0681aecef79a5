"""The model set through either frontend: one graph, which computes what torch computes, gradients included."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.models import MODELS
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, param_view
from pdv.frontend import Program, load_program
from pdv.frontend.onnx.export import export_onnx

from .conftest import Lowered

Lower = Callable[[str], Lowered]
DISTINCT = sorted(set(MODELS) - {"bert-large"})  # which is BERT, but for its size
# Their operators are those of other models, and node tests; ResNet-50 is trained by tests on processes.
LONG = {"inception-v3", "mixtral", "resnet50", "resnext50", "xdl"}
every_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in DISTINCT]
)


def count(graph: Graph) -> Counter[str]:
    return Counter(node.op.name for node in graph.nodes)


def run(program: Program, inputs: tuple[torch.Tensor, ...]) -> Any:
    values = {name: program.weights.load(name) for name in program.weights.names}
    values |= {node.attr("name"): x.numpy() for node, x in zip(program.graph.inputs, inputs, strict=True)}
    return evaluate(program.graph, values)


@every_model
def test_both_frontends_give_the_same_graph(lowered: Lower, name: str) -> None:
    model = lowered(name)
    assert model.from_torch.graph.digest == model.from_onnx.graph.digest


@every_model
def test_both_frontends_give_the_same_weights(lowered: Lower, name: str) -> None:
    model = lowered(name)
    assert model.from_torch.weights.names == model.from_onnx.weights.names
    for tensor in model.from_torch.weights.names:
        assert np.array_equal(model.from_torch.weights.load(tensor), model.from_onnx.weights.load(tensor)), tensor


@every_model
def test_forward_and_gradients_equal_torch(lowered: Lower, name: str) -> None:
    model = lowered(name)
    # float64, so that the program is compared and not float32's rounding, which batch norms amplify
    module = copy.deepcopy(model.module).double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in model.inputs)
    y = module(*inputs)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(seed)
    result = run(model.from_onnx, inputs)
    assert np.abs(result.gather()["output"] - y.detach().numpy()).max() <= 1e-5 * y.detach().abs().max().item()

    expected = dict(module.named_parameters(remove_duplicate=False))
    gradients = result.gather_gradients({"output": seed.numpy()})
    views = {node.name: node for node in model.from_onnx.graph.params}
    assert set(gradients) == {name for name, node in views.items() if node.attr("trainable")}
    for tensor, gradient in gradients.items():
        reference = expected[tensor].grad
        assert reference is not None, tensor
        for step in param_view(views[tensor]):
            reference = reference.permute(step[1]) if step[0] == "permute" else reference.reshape(step[1])
        scale = max(reference.abs().max().item(), 1e-3)
        assert np.abs(gradient - reference.numpy()).max() <= 1e-4 * scale, tensor


def test_running_statistics_move_as_in_torch(lowered: Lower) -> None:
    model = lowered("resnet50")
    module = copy.deepcopy(model.module).double()
    before = run(model.from_torch, tuple(x.double() for x in model.inputs)).gather()
    module(*(x.double() for x in model.inputs))
    buffers = dict(module.named_buffers())
    updates = {name.removeprefix("update:"): value for name, value in before.items() if name.startswith("update:")}
    assert len(updates) == 30
    for name, value in updates.items():
        assert np.allclose(value, buffers[name].numpy(), rtol=1e-5, atol=1e-7), name


def test_attention_before_opset_23_is_recognised(lowered: Lower, tmp_path: Path) -> None:
    model = lowered("llama")
    export_onnx(model.module, model.inputs, tmp_path / "old.onnx", opset=18)
    assert load_program(tmp_path / "old.onnx").graph.digest == model.from_torch.graph.digest


def test_gpt2_is_canonical(lowered: Lower) -> None:
    graph = lowered("gpt2").from_onnx.graph
    ops = count(graph)
    assert ops["linear"] == 9
    assert ops["gelu"] == 2
    assert [node.attr("causal") for node in graph.nodes if node.op.name == "attention"] == [True, True]
    assert not {"matmul", "tanh", "pow", "cast"} & set(ops)
    attn = next(node for node in graph.params if node.name == "transformer.h.0.attn.c_attn.weight")
    assert param_view(attn) == (("permute", (1, 0)),)
    tied = next(node for node in graph.params if node.name == "lm_head.weight")
    assert sorted(user.op.name for user in graph.users[tied]) == ["embedding", "linear"]


def test_llama_is_canonical(lowered: Lower) -> None:
    graph = lowered("llama").from_torch.graph
    ops = count(graph)
    assert (ops["rms_norm"], ops["silu"], ops["attention"]) == (5, 2, 2)
    assert ops["const"] == 2, "the rotary tables, folded"
    assert not {"sin", "cos", "sigmoid", "rsqrt"} & set(ops)


def test_mixtral_computes_what_its_loop_over_experts_does(lowered: Lower) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM, MixtralSparseMoeBlock

    model = lowered("mixtral")
    config: Any = model.module.config
    original: Any = MixtralForCausalLM(config)
    original.load_state_dict(model.module.state_dict())
    assert type(original.model.layers[0].mlp) is MixtralSparseMoeBlock
    expected = original.train()(*model.inputs, use_cache=False).logits
    assert torch.allclose(model.module(*model.inputs), expected, rtol=1e-5, atol=1e-6)
    graph = model.from_torch.graph
    assert count(graph)["top_k"] == 2
    down = next(node for node in graph.params if node.name.endswith("layers.0.mlp.experts.down_proj"))
    (product,) = graph.users[down]
    assert product.loops.extents[product.loops.result[0][0]] == 8, "the experts are a loop"


@every_model
def test_constants_do_not_hold_the_batch(lowered: Lower, name: str) -> None:
    model = lowered(name)
    batch = model.inputs[0].shape[0]
    for node in model.from_torch.graph.nodes:
        if node.is_const and node.type.rank > 2:
            assert node.type.shape[0] != batch, node
