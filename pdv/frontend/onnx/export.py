"""Write a module as an ONNX file that keeps all that training needs: parameter names, and batch normalisation in
training mode.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    from pdv.frontend.torch.dynamic_shapes import DynamicShapes

MAX_EMBEDDED_BYTES = 64 << 20  # beyond it, parsing the file would read and copy every weight
OPSET = 23  # the first with Attention and RMSNormalization


def export_onnx(
    module: torch.nn.Module,
    example_inputs: tuple[torch.Tensor, ...],
    path: str | os.PathLike[str],
    *,
    opset: int = OPSET,
    dynamic_shapes: DynamicShapes | None = None,
) -> None:
    """Export `module` in the mode it is in; its weights go beside `path`, to `<path>.data`, where they are big.

    dynamic_shapes: sizes to leave open, as ``torch.export.export`` takes them; the file has them by their names.
    """
    import torch

    with _quiet():
        program = torch.onnx.export(
            module,
            example_inputs,
            dynamo=True,
            dynamic_shapes=cast(Any, dynamic_shapes),
            opset_version=opset,
            optimize=False,  # would fold batch normalisation away, and make one weight of all that start out equal
            verbose=False,
            custom_translation_table=_translations() if module.training else None,
        )
    assert program is not None, "torch.onnx.export(dynamo=True) without a path returns the program"
    stored = sum(tensor.nbytes for tensor in module.state_dict().values())
    program.save(Path(path), external_data=stored > MAX_EMBEDDED_BYTES)


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


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:  # Any: onnxscript values are untyped
    """torch 2.13 writes every batch normalisation in inference mode ("temporary fix" in its torchlib); these do not."""
    import torch
    from onnxscript import opset23 as op

    def training_batch_norm(
        x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
    ) -> Any:
        """x: [n, c, h, w] -> (y, mean, rstd, new running mean, new running variance); only y is used."""
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

    functional = "_native_batch_norm_legit_functional"  # what torch.export leaves of a norm with running statistics
    return {getattr(torch.ops.aten, functional).default: training_batch_norm}
