"""`pdv doctor`: is everything here that planning, and running a plan, need?"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Literal

from ir.errors import UsageError
from pdv.cli.output import DebugOption, JsonOption, print_json

REQUIRED = (
    "numpy",
    "ml-dtypes",
    "networkx",
    "scipy",
    "threadpoolctl",
    "pydantic",
    "PyYAML",
    "typer",
    "rich",
    "onnx",
    "onnx-ir",
    "safetensors",
    "torch",
)
OPTIONAL = {
    "transformers": "the example models",
    "onnxscript": "exporting modules to ONNX",
    "onnxruntime": "running ONNX files against what was read of them (else onnx's slow reference does)",
    "torch-geometric": "training the cost model (pdv cost train)",
    "pyarrow": "training the cost model (pdv cost train)",
    "matplotlib": "plots of the cost model",
    "triton": "profiles of fused kernels (pdv profile)",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    state: Literal["ok", "note", "missing"]
    detail: str


def doctor(
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Look at this installation and this machine."""
    findings = [*_packages(), _torch(), _machine()]
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if not missing and as_json:
        print_json("doctor", findings=[asdict(finding) for finding in findings])
    if not as_json:
        for finding in findings:
            print(f"{finding.state:<8} {finding.name:<15} {finding.detail}")
    if missing:
        raise UsageError(f"missing here: {', '.join(missing)}", mend="Install with `pip install pipedejavu`")


def _packages() -> list[Finding]:
    findings = [Finding("python", "ok", platform.python_version())]
    for name in REQUIRED:
        version = _version(name)
        findings.append(Finding(name, "ok" if version else "missing", version or "needed"))
    for name, purpose in OPTIONAL.items():
        version = _version(name)
        findings.append(Finding(name, "ok" if version else "note", version or f"absent; only for {purpose}"))
    return findings


def _version(distribution: str) -> str | None:
    from importlib import metadata  # which loads the whole of email

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Finding:
    """What torch can run a plan on."""
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing
        return Finding("devices", "missing", f"torch cannot be imported: {error}")
    if not distributed.is_available():
        return Finding("devices", "missing", "this torch was built without torch.distributed")
    backends = [
        name
        for name, here in (("nccl", distributed.is_nccl_available()), ("gloo", distributed.is_gloo_available()))
        if here
    ]
    if "nccl" in backends and torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's
        backends[backends.index("nccl")] = f"nccl {version} (CUDA {torch.version.cuda})"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or "no GPU, processes on CPU"
    return Finding("devices", "ok", f"{devices}; backends {', '.join(backends) or 'none'}")


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    memory = ""
    if sys.platform == "linux":
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory"
    return Finding("machine", "ok", f"{cores} cores{memory}, {platform.system()} {platform.machine()}")
