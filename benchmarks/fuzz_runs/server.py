"""A process that has everything imported and runs each command in a fork of itself, with limits, watched.

Started by ``benchmarks/fuzz_runs/run.py``; reads one JSON object a line (``folder``, ``command``) and answers with one.
In the fork all that Python opens is seen (an audit hook): reads outside of the case's folder, Python's and the
repository's, and writes other than of what starts with ``out``, are escapes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CPU_S, WALL_S = 30, 150
MEMORY_BYTES = 6 << 30
READABLE = ("/usr", "/lib", "/etc", "/proc", "/sys", "/dev", "/opt", "/bin")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ESCAPES = "escapes"  # the file, beside a case's folder, with a line for each


def main() -> None:
    """Answer until there is nothing more to read."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    _import_all()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_run(Path(asked["folder"]), asked["command"], asked["room"])), flush=True)


def _import_all() -> None:
    """What commands import when they run: importing is not what is measured."""
    import importlib
    import pkgutil

    for name in (
        "torch",
        "onnxruntime",
        "onnx.reference",
        "onnx.reference.ops",
        "pyarrow.parquet",
        "safetensors.numpy",
    ):
        importlib.import_module(name)
    for package in ("ir", "pdv", "learned_cost"):
        found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        for module in found:
            if (
                ".templates." in module.name
                or "__main__" in module.name
                or "triton" in module.name
                or ".profile." in module.name
            ):
                continue
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue


def _run(folder: Path, command: list[str], room: int) -> dict[str, Any]:
    """What became of a command: its exit code (negative: the signal), what it printed, seconds and bytes."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(folder, command, room)
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > WALL_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    return {
        "code": code,
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - started,
        "peak_bytes": used.ru_maxrss * 1024,
    }


def _child(folder: Path, command: list[str], room: int) -> None:
    """Run the command and end; never returns."""
    code = 99
    try:
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(os.dup(i), mode, encoding="utf-8", errors="backslashreplace")
            for i, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        os.environ.update(XDG_CACHE_HOME=str(folder / "cache"), XDG_STATE_HOME=str(folder / "state"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        os.chdir(folder / "work")
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if room:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        _watch(folder)
        from pdv.cli.app import run

        code = run(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # what passes run() is what this is to find
        import traceback

        traceback.print_exc()
        code = 98
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)


def _watch(folder: Path) -> None:
    """Note every file that is opened and should not be."""
    inside = str(folder)
    own = (*(folder / name for name in ("cache", "state", "tmp")), folder / "work" / "out", folder / "work" / ".out")
    writable = (*map(str, own), "/dev/null")
    readable = tuple(
        str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix, Path(__file__).parents[2], *READABLE)
    )
    forbidden = str(folder / "outside")
    log = os.open(folder / ESCAPES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    busy = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy or event not in (
            "open",
            "os.mkdir",
            "os.rename",
            "os.symlink",
            "os.exec",
        ):
            return
        busy = True
        try:
            if event == "open" and isinstance(args[0], str | bytes):
                path, flags = os.path.realpath(os.fsdecode(args[0])), args[2] or 0
                writes = bool(flags & WRITING)
            elif event == "open":
                return
            else:
                path, writes = os.path.realpath(os.fsdecode(args[1 if event == "os.rename" else 0])), True
            written = path.startswith(writable) or (event == "os.mkdir" and path == str(folder / "work"))
            read = path.startswith(readable) or (path.startswith(inside) and not path.startswith(forbidden))
            if not (written if writes else written or read):
                os.write(log, f"{'writes' if writes else 'reads'} {path} ({event})\n".encode("utf-8", "replace"))
        except (ValueError, TypeError, OSError):
            return
        finally:
            busy = False

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
