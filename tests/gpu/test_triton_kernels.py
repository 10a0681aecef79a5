"""Our Triton kernels compute what the library does: in Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from itertools import product
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SHAPES = [(2, 3, 64), (5, 96), (1, 1000)]  # whole blocks, parts of one, widths that are no power of two
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # 8 bits, and the library rounds between bias and gelu
NEEDS_TRITON = pytest.mark.skipif(util.find_spec("triton") is None, reason="needs Triton: pipedejavu[triton]")


def check(device: str) -> None:
    """Both kernels against the library's, for every shape and type."""
    from benchmarks import triton_kernels as ours

    torch.manual_seed(0)
    for shape, (dtype, tolerance) in product(SHAPES, TOLERANCES.items()):
        x, vector = torch.randn(shape, device=device, dtype=dtype), torch.randn(shape[-1], device=device, dtype=dtype)
        gelu = torch.nn.functional.gelu(x + vector, approximate="tanh")
        torch.testing.assert_close(ours.bias_gelu(x, vector), gelu, rtol=tolerance, atol=tolerance)
        norm = torch.nn.functional.rms_norm(x, x.shape[-1:], vector, 1e-5)
        torch.testing.assert_close(ours.rms_norm(x, vector, 1e-5), norm, rtol=tolerance, atol=tolerance)


@NEEDS_TRITON
def test_kernels_equal_the_library(device: torch.device) -> None:
    if device.type == "cuda":
        check("cuda")
        return
    # A process of its own: Triton reads whether to interpret when it is first imported.
    code = "from tests.gpu.test_triton_kernels import check; check('cpu')"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
