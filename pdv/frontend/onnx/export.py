"""Write a module as an ONNX file that keeps all that training needs: parameter names, and batch normalisation in
training mode. It is exported as `pdv.optimize` exports a module, so that both ways lead to the same program.

Some operators torch 2.13 writes otherwise than they are trained: every batch normalisation in inference mode (a
"temporary fix" in its torchlib), attention with dropout without the dropout, its mask of truth values added to floats,
and cross entropy without the smoothing of its labels. These are written here. Entry point: ``export_onnx``.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from onnxscript import opset23

from ir.errors import ModelError, first_line
from pdv.frontend.onnx.exported import KIND
from pdv.frontend.onnx.model import PERSISTENT
from pdv.frontend.onnx.origins.doubts import OURS
from pdv.frontend.torch.decomposed import stopped_gradients
from pdv.frontend.torch.module import export_module
from pdv.frontend.torch.program import OWN_BACKWARD

if TYPE_CHECKING:
    from pdv.frontend.torch.dynamic_shapes import DynamicShapes
    from pdv.frontend.torch.module import ExampleInputs

MAX_EMBEDDED_BYTES = 64 << 20  # beyond it, parsing the file would read and copy every weight
OPSET = 23  # the first with Attention and RMSNormalization
_BOOL = 9  # of ONNX's element types
Symbol = Any  # values of onnxscript, whose types are those of one operator alone
op: Any = opset23


def export_onnx(
    module: torch.nn.Module,
    example_inputs: ExampleInputs,
    path: str | os.PathLike[str],
    *,
    opset: int = OPSET,
    dynamic_shapes: DynamicShapes | None = None,
) -> None:
    """Export `module` in the mode it is in; its weights go beside `path`, to `<path>.data`, where they are big.

    dynamic_shapes: sizes to leave open, as ``torch.export.export`` takes them; the file has them by their names.

    Raises:
        ModelError: if `torch.export` cannot trace the module, or torch cannot write what it traced.
    """
    exported = export_module(module, example_inputs, dynamic_shapes=dynamic_shapes)
    if module.training and (functions := exported.graph_module.meta[OWN_BACKWARD]):
        raise ModelError(
            f"{', '.join(functions)} have a backward of their own, for which ONNX has no word",
            "Functions whose backward is linear in the gradients that it is given, of modules that run on their inputs",
            "Write it with detach: x + (y - x).detach() has the value of y and the gradient of x",
        )
    _reshape_anew(exported.graph)
    try:
        with _quiet(), stopped_gradients(exported):
            program = torch.onnx.export(
                exported,
                dynamo=True,
                dynamic_shapes=cast(Any, dynamic_shapes),  # for the names: the program has numbers of its own
                opset_version=opset,
                optimize=False,  # would fold batch normalisation away, and make one weight of all that start out equal
                verbose=False,
                custom_translation_table=_translations(opset),
            )
    except torch.onnx.OnnxExporterError as error:
        what = f"torch.onnx.export cannot write {type(module).__name__}: {first_line(error.__cause__ or error)}"
        raise ModelError(
            what, "Modules that torch can write", "Plan the module itself: pdv.optimize(module, inputs)"
        ) from error
    assert program is not None, "torch.onnx.export(dynamo=True) without a path returns the program"
    for name, parameter in module.named_parameters():
        stored_as = program.model.graph.initializers.get(name)
        if not parameter.requires_grad and stored_as is not None:  # which torch's exporter does not say
            stored_as.metadata_props.update({KIND: "BUFFER", PERSISTENT: "True"})
    program.model.metadata_props[OURS] = str(opset)
    stored = sum(tensor.nbytes for tensor in module.state_dict().values())
    program.save(Path(path), external_data=stored > MAX_EMBEDDED_BYTES)


def _reshape_anew(graph: torch.fx.Graph) -> None:
    """Nothing is reshaped in the memory where it lies: torch takes operators apart before it writes them, twice, and
    strides change by that.
    """
    reshape = torch.ops.aten.reshape.default
    for node in list(graph.nodes):
        if node.target not in (torch.ops.aten.view.default, reshape):
            continue
        node.target, source = reshape, node.args[0]
        schema = getattr(source.target, "_schema", None)
        if schema is not None and schema.returns[0].alias_info is not None:  # another view of somebody's memory
            with graph.inserting_before(node):
                own = graph.call_function(
                    torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
            own.meta = dict(source.meta)
            node.replace_input_with(source, own)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs that torchvision is missing, and warns that a module in training mode is meant to be."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Exporting a model while it is in training mode")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        logger.setLevel(before)


def _batch_norm(
    x: Symbol,
    weight: Symbol,
    bias: Symbol,
    running_mean: Symbol,
    running_var: Symbol,
    training: bool,
    momentum: float,
    eps: float,
) -> Symbol:
    """x: [n, c, ...] -> (y, mean, rstd, new running mean, new running variance); only y is used."""
    y, mean, variance = op.BatchNormalization(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        epsilon=eps,
        momentum=1.0 - momentum,
        training_mode=1 if training else 0,
    )
    return y, mean, variance, mean, variance


def _attention(
    query: Symbol,
    key: Symbol,
    value: Symbol,
    attn_mask: Symbol | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Symbol:
    """query: [b, h, s, e], key: [b, g, t, e], value: [b, g, t, f] -> [b, h, s, f]."""
    del enable_gqa  # ONNX sees it in the shapes
    if dropout_p == 0:
        return op.Attention(query, key, value, attn_mask=attn_mask, scale=scale, is_causal=int(is_causal))[0]
    heads, groups = query.shape[1], key.shape[1]
    if groups != heads:
        key, value = (_repeat(x, heads // groups) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = op.Mul(op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])), _like(factor, query))
    if is_causal:
        rows = op.Concat(op.Shape(query, start=-2, end=-1), op.Shape(key, start=-2, end=-1), axis=0)
        attn_mask = op.Cast(op.Trilu(op.Expand(op.Constant(value_float=1.0), rows), upper=0), to=_BOOL)
    if attn_mask is None:
        shares = op.Softmax(scores, axis=-1)
    else:
        if not is_causal and attn_mask.dtype != _BOOL:
            scores = op.Add(scores, op.CastLike(attn_mask, query))
            attn_mask = op.Greater(attn_mask, _like(-math.inf, attn_mask))
        lowest = float(np.finfo(np.float32).min / 2)
        shares = op.Softmax(op.Where(attn_mask, scores, _like(lowest, query)), axis=-1)
        shares = op.Where(attn_mask, shares, _like(0.0, query))
    dropped = op.Dropout(shares, op.Constant(value_float=dropout_p), op.Cast(op.Constant(value_int=1), to=_BOOL))[0]
    return op.MatMul(dropped, value)


def _cross_entropy(
    logits: Symbol,
    target: Symbol,
    weight: Symbol | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Symbol:
    """logits: [n, c, ...], target: [n, ...]; reduction: none, mean, sum."""
    if not label_smoothing:
        kind = ("none", "mean", "sum")[reduction]
        return op.SoftmaxCrossEntropyLoss(logits, target, weight, reduction=kind, ignore_index=ignore_index)[0]
    if weight is not None:
        raise NotImplementedError("cross entropy with weights of classes and smoothed labels")
    each = op.SoftmaxCrossEntropyLoss(logits, target, reduction="none", ignore_index=ignore_index)[0]
    spread = op.ReduceMean(op.LogSoftmax(logits, axis=1), op.Constant(value_ints=[1]), keepdims=0)
    counted = op.Not(op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target)))
    smooth = op.Mul(op.Where(counted, spread, _like(0.0, logits)), _like(-label_smoothing, logits))
    losses = op.Add(op.Mul(each, _like(1 - label_smoothing, logits)), smooth)
    if reduction == 0:
        return losses
    total = op.ReduceSum(losses, keepdims=0)
    return total if reduction > 1 else op.Div(total, op.ReduceSum(op.CastLike(counted, logits), keepdims=0))


def _like(number: float, x: Symbol) -> Symbol:
    return op.CastLike(op.Constant(value_float=number), x)


def _repeat(x: Symbol, times: int) -> Symbol:
    """x: [b, g, t, e] -> [b, g * times, t, e], each head so often in a row."""
    apart = op.Unsqueeze(x, op.Constant(value_ints=[2]))
    many = op.Expand(apart, op.Constant(value_ints=[1, 1, times, 1, 1]))
    return op.Reshape(many, op.Constant(value_ints=[0, x.shape[1] * times, -1, x.shape[3]]))


def _translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator of torch -> what writes it, in this opset."""
    functional = "_native_batch_norm_legit_functional"  # what torch.export leaves of a norm with running statistics
    found: dict[Callable[..., Any], Callable[..., Any]] = {getattr(torch.ops.aten, functional).default: _batch_norm}
    found[torch.ops.aten.cross_entropy_loss.default] = _cross_entropy
    if opset >= OPSET:
        found[torch.ops.aten.scaled_dot_product_attention.default] = _attention
    return found
