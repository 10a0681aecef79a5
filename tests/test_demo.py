"""The demo, small: export, plan, train on four processes, compare with one device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.distributed
@pytest.mark.slow  # `make demo` is the same at full length
def test_small_demo_ends_with_equal_losses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--small", "--steps", "4", "--output", str(tmp_path / "demo")]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ": equal within 1e-04" in result.stdout
    assert re.search(r"step time: predicted \d+ ± \d+ ms \(.*\)\n +measured \d+ ms", result.stdout)
    assert re.search(r"in turns:  this plan \d+ ms, DistributedDataParallel \d+ ms: \d+\.\d\d times", result.stdout)
