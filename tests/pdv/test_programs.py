"""Programs that are run to their end: what they say, and that they end with the process that runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdv.programs import run_to_end

RUNS = (
    "import os, sys\nfrom pdv.programs import run_to_end\n"
    "run_to_end([sys.executable, '-c', sys.argv[1]], dict(os.environ), capture=True)\n"
)
SLEEPS = "import os, pathlib, time; pathlib.Path('now').write_text(str(os.getpid())); os.rename('now', 'pid')\n"


def test_what_it_says_and_its_code_are_had() -> None:
    done = run_to_end([sys.executable, "-c", "print('ok'); raise SystemExit(3)"], dict(os.environ), capture=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "ok\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_what_runs_it(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-c", RUNS, f"{SLEEPS}time.sleep(120)"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # in a session of its own, away from a terminal, and told alone
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    ) as started:
        while not (tmp_path / "pid").exists():
            assert started.poll() is None
            time.sleep(0.02)
        started.send_signal(number)
        assert started.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_it_is_told_what_came_while_it_started(tmp_path: Path) -> None:
    """A signal that the operating system delivers in the midst of Popen."""
    starts = (
        "import os, signal, subprocess\nstart = subprocess.Popen.__init__\n"
        "def late(*of, **how):\n    start(*of, **how)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen.__init__ = late\n"
    )
    words = [sys.executable, "-c", starts + RUNS, "import time; time.sleep(120)"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, cwd=tmp_path, env=environment, start_new_session=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
