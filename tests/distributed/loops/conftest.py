"""What tests of several loops take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from tests.distributed.loops.plans import gpt2_package


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """GPT-2's package by the name of a plan, each written once."""
    return cache(partial(gpt2_package, folder=tmp_path_factory.mktemp("packages")))
