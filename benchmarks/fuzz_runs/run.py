"""Cases, run one after another, and what each came to. Entry point: ``Runner``."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fuzz_runs.case import Case
from benchmarks.fuzz_runs.server import CPU_S, ESCAPES, MEMORY_BYTES, WALL_S
from benchmarks.record import ROOT, environment

_ROW = re.compile(r"\| (\d+) \| ((?:`[\w-]+`(?:, )?)+) \|")
_SLUG = re.compile(r"error: ([a-z-]+): ")
_TOUCHED = 0x1 | 0x2 | 0x20 | 0x100 | 0x200  # IN_ACCESS, IN_MODIFY, IN_OPEN, IN_CREATE, IN_DELETE


def exit_codes() -> dict[str, int]:
    """Slug -> exit code, as docs/errors.md has them."""
    found = {}
    for code, slugs in _ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8")):
        found |= {slug.strip("` "): int(code) for slug in slugs.split(",")}
    return found


CODES = exit_codes()


@dataclass(frozen=True)
class Result:
    """What a case came to.

    Attributes:
        outcome: "answer", a slug of docs/errors.md, or what went wrong: "traceback", "time", "memory", "escape",
            "half-written", "noise" (more or other than one error on stderr), "wrong-code".
        said: the last line on stderr, or what was wrong.
    """

    case: Case
    outcome: str
    said: str
    cpu_s: float
    peak_bytes: int

    @property
    def failed(self) -> bool:
        """Whether pdv did what it never should."""
        return self.outcome not in CODES.keys() - {"internal-error"} | {"answer"}


class Runner:
    """Runs cases; ``real``: each as a program of its own, not in a fork of one that has everything imported."""

    def __init__(self, *, real: bool = False) -> None:
        self.real = real
        self.root = Path(tempfile.mkdtemp(prefix="pdv-fuzz-"))
        self.server: Any = None  # Any: a Popen of text
        self.number = 0

    def __call__(self, case: Case, *, keep: bool = False) -> Result:
        """What it came to; ``keep``: its folder stays."""
        self.number += 1
        folder = self.root / str(self.number)
        case.write(folder)
        before = _listing(folder)
        watch = _Watch(folder / "outside")
        told = self._program(folder, case) if self.real else self._fork(folder, case)
        outcome, said = _judge(folder, told, before, touched=watch.touched())
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return Result(case, outcome, said, told["cpu_s"], told["peak_bytes"])

    def _fork(self, folder: Path, case: Case) -> dict[str, Any]:
        if self.server is None or self.server.poll() is not None:
            script = [sys.executable, str(Path(__file__).with_name("server.py"))]
            variables = environment(ORT_DISABLE_TELEMETRY="1")
            self.server = subprocess.Popen(
                script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
            )
        self.server.stdin.write(
            json.dumps({"folder": str(folder), "command": list(case.command), "room": case.room}) + "\n"
        )
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        return dict(json.loads(answer)) if answer else {"code": -9, "cpu_s": 0.0, "wall_s": 0.0, "peak_bytes": 0}

    def _program(self, folder: Path, case: Case) -> dict[str, Any]:
        variables = environment(
            ORT_DISABLE_TELEMETRY="1",
            XDG_CACHE_HOME=str(folder / "cache"),
            XDG_STATE_HOME=str(folder / "state"),
            TMPDIR=str(folder / "tmp"),
        )
        started = time.monotonic()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "pdv", *case.command],
                cwd=folder / "work", env=variables, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            while True:
                done, status, used = os.wait4(process.pid, os.WNOHANG)
                if done:
                    break
                if time.monotonic() - started > WALL_S:
                    process.kill()
                time.sleep(0.01)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        return {"code": code, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}

    def close(self) -> None:
        """End the server, and remove what is left of cases."""
        if self.server is not None:
            self.server.stdin.close()
            self.server.wait(timeout=60)
            self.server.stdout.close()
        shutil.rmtree(self.root, ignore_errors=True)


def _judge(folder: Path, told: dict[str, Any], before: dict[str, Any], *, touched: bool) -> tuple[str, str]:
    """The outcome, and what was said of it."""
    errors = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in errors.splitlines() if line]
    said = lines[-1][:400] if lines else ""
    escapes = folder / ESCAPES
    if touched or (escapes.exists() and escapes.stat().st_size):
        return "escape", escapes.read_text(encoding="utf-8", errors="replace")[:400] if escapes.exists() else "outside"
    if told["code"] in (-24, -9) or told["cpu_s"] > CPU_S:
        return "time", said
    if told["peak_bytes"] > MEMORY_BYTES or "MemoryError" in errors:
        return "memory", said
    if told["code"] < 0 or "Traceback" in errors or said.startswith("error: internal-error"):
        return "traceback", f"signal {-told['code']}: {said}" if told["code"] < 0 else said
    after = _listing(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if any(not name.startswith("work/out") for name in changed):
        return "escape", f"changed {sorted(changed)[:4]}"
    other = [line for line in lines if not line.startswith(("error: ", "warning: "))]
    if told["code"] == 0:
        return ("noise", other[0]) if other or "error: " in errors else ("answer", said)
    slug = _slug(said, (folder / "stdout").read_text(encoding="utf-8", errors="replace"))
    if not slug or other or sum(line.startswith("error: ") for line in lines) > 1:
        return "noise", other[0] if other else f"code {told['code']}: {said}"
    if CODES.get(slug) != told["code"]:
        return "wrong-code", f"code {told['code']}: {said}"
    return ("half-written", f"{sorted(changed)[:4]}: {said}") if changed else (slug, said)


def _slug(said: str, printed: str) -> str:
    """The slug of the error on stderr, or of the object that --json prints; `cluster validate` lists its errors."""
    if found := _SLUG.match(said):
        return found[1]
    if printed.startswith("{"):
        document = json.loads(printed)
        return "bad-cluster" if document.get("errors") else str(document.get("error", {}).get("slug", ""))
    return "bad-cluster" if printed.startswith("error: ") else ""


def _listing(folder: Path) -> dict[str, Any]:
    """Size and time of every file of a case but those that are its own."""
    found = {}
    for top in ("in", "work", "outside"):
        for path in sorted((folder / top).rglob("*")):
            facts = path.lstat()
            if not path.is_dir() or path.is_symlink():
                found[path.relative_to(folder).as_posix()] = facts.st_size, facts.st_mtime_ns
    return found


class _Watch:
    """Whether anybody, Python or not, opens what lies in a folder (inotify)."""

    def __init__(self, folder: Path) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.handle = self.libc.inotify_init1(os.O_NONBLOCK)
        assert self.handle >= 0, ctypes.get_errno()
        self.libc.inotify_add_watch(self.handle, os.fsencode(folder / "secret.bin"), _TOUCHED)

    def touched(self) -> bool:
        """True if somebody did, up to now."""
        try:
            return len(os.read(self.handle, 1 << 12)) >= struct.calcsize("iIII")
        except BlockingIOError:
            return False
        finally:
            os.close(self.handle)
