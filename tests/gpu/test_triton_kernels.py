"""Our Triton kernels compute what torch does: in Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from itertools import product
from pathlib import Path

import pytest
import torch

from ir.types import DType, TensorType

ROOT = Path(__file__).parents[2]
SHAPES = [(3, 64), (2, 200)]  # whole blocks, and a width that is no power of two
TOLERANCES = {DType.F32: 1e-5, DType.BF16: 4e-2}  # 8 bits, and the library rounds after each operator
NEEDS_TRITON = pytest.mark.skipif(util.find_spec("triton") is None, reason="needs Triton: pipedejavu[triton]")


def check(device: str) -> None:
    """Every kernel against torch's operators, for every shape and type."""
    from learned_cost.profile.programs.fusions import FUSIONS, fusion, runs
    from learned_cost.profile.programs.subgraphs import callable_of, inputs_of

    torch.manual_seed(0)
    for name, shape, (dtype, tolerance) in product(FUSIONS, SHAPES, TOLERANCES.items()):
        if device == "cpu" and dtype is DType.BF16 and name.startswith("linear"):
            continue  # products of bfloat16 are wrong in the interpreter
        graph = fusion(name, TensorType(shape, dtype), 40)
        operands = inputs_of(graph, torch.device(device))
        scale = shape[-1] ** -0.5 if name.startswith("linear") else 1.0
        operands = [operands[0] * scale, *operands[1:]]
        found = runs()[name](operands)
        wanted = callable_of(graph)(*operands)
        for mine, theirs in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def interprets() -> bool:
    """Whether Triton's interpreter takes this NumPy: 3.6's counts loops by ``int`` of an array, an error since 2.5."""
    import numpy as np
    import triton

    newer = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, np)]
    return newer[0] > (3, 6) or newer[1] < (2, 5)


@NEEDS_TRITON
def test_kernels_equal_the_library(device: torch.device) -> None:
    if device.type == "cuda":
        check("cuda")
        return
    if not interprets():
        pytest.skip("Triton 3.6 does not interpret with NumPy 2.5")
    # A process of its own: Triton reads whether to interpret when it is first imported.
    code = "from tests.gpu.test_triton_kernels import check; check('cpu')"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
