"""The device a test runs on: the CPU always, so that the tests themselves are tested, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device; float32 means float32 on it, TF32 is off."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield torch.device(request.param)
    torch.backends.cudnn.allow_tf32 = allowed
