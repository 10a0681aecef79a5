"""How to start a training script on the devices that a plan was made for. Entry points: ``Launch``, ``read_launch``.

Devices are numbered node by node, and so are ranks: torchrun counts them host by host, in the order of the cluster
file. A plan's mesh is row-major over them, stage after stage.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ir.errors import UsageError
from pdv.cluster import Cluster
from pdv.plan.package import read_document
from pdv.plan.seal import refusing

PORT = 29500  # torchrun's own
HOST = re.compile(r"[\w.:%\[\]-]+")
WAYS = ("torchrun", "slurm", "kubernetes")


@dataclass(frozen=True)
class Launch:
    """A script to be run on all devices of a plan.

    Attributes:
        name: of the package.
        processes: on each host, in order.
        environment: what every process needs beside what torchrun sets.
        words: the script and its arguments.
        hosts: their addresses, in order; a placeholder where they are not known.
        on_gpus: whether each process has a GPU.
    """

    name: str
    processes: tuple[int, ...]
    environment: Mapping[str, str]
    words: tuple[str, ...]
    hosts: tuple[str, ...]
    port: int
    on_gpus: bool

    def arguments(self, host: int) -> list[str]:
        """Of torchrun on one host."""
        count = len(self.processes)
        each = f"--nproc-per-node={self.processes[host]}"
        if count == 1:
            return ["--standalone", each, *self.words]
        place = f"--nnodes={count}", f"--node-rank={host}", each
        return [*place, f"--master-addr={self.hosts[0]}", f"--master-port={self.port}", *self.words]

    def torchrun(self) -> str:
        """A line of shell for each host."""
        lines = []
        for host, end in enumerate(accumulate(self.processes)):
            start = end - self.processes[host]
            lines.append(
                f"# {self.hosts[host]}: {f'ranks {start} to {end - 1}' if end - start > 1 else f'rank {start}'}"
            )
            values = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
            lines.append(" ".join([*values, "torchrun", shlex.join(self.arguments(host))]))
        return "\n".join(lines)

    def slurm(self) -> str:
        """A script for ``sbatch``.

        Raises:
            UsageError: if hosts have different numbers of devices.
        """
        each = self._each("slurm")
        devices = f"--gpus-per-node={each}" if self.on_gpus else f"--cpus-per-task={each}"
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        options = f"--nnodes={len(self.processes)}", f"--nproc-per-node={each}", f"--master-port={self.port}"
        words = shlex.join([*options, *self.words])
        torchrun = 'exec torchrun --node-rank="$SLURM_PROCID" --master-addr="$MASTER_ADDR" "$@"'
        return "\n".join(
            [
                "#!/bin/bash",
                f"#SBATCH --job-name={shlex.quote(_line(self.name))}",
                f"#SBATCH --nodes={len(self.processes)}",
                "#SBATCH --ntasks-per-node=1",
                f"#SBATCH {devices}",
                "set -eu",
                *exports,
                'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
                "# one torchrun on each node; SLURM_PROCID counts them in the order of the node list",
                f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(torchrun)} torchrun {words}",
            ]
        )  # fmt: skip

    def kubernetes(self) -> str:
        """An indexed Job, a pod for each host, and the service by which the pods find the first one.

        Raises:
            UsageError: if hosts have different numbers of devices.
        """
        each, count = self._each("kubernetes"), len(self.processes)
        name = _label(self.name)
        limits = {"nvidia.com/gpu": each} if self.on_gpus else {"cpu": each}
        place = f"--node-rank=$(JOB_COMPLETION_INDEX) --master-addr={name}-0.{name} --master-port={self.port}"
        words = ["torchrun", f"--nnodes={count}", f"--nproc-per-node={each}", *place.split()]
        words += [word.replace("$", "$$") for word in self.words]  # which Kubernetes reads as one
        pod = {
            "subdomain": name,
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "train",
                    "image": "IMAGE",
                    "command": words,
                    "env": [{"name": key, "value": value} for key, value in self.environment.items()],
                    "resources": {"limits": limits},
                }
            ],
        }
        job = {"completions": count, "parallelism": count, "completionMode": "Indexed", "backoffLimit": 0}
        selector = {"job-name": name}  # a label that Kubernetes gives to the pods of a job
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        documents = [
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": name},
                "spec": {**job, "template": {"spec": pod}},
            },
        ]
        texts = [json.dumps(document, indent=2) for document in documents]  # JSON is YAML
        return "\n---\n".join(["# replace IMAGE by one that has torch, the script and the package", *texts])

    def _each(self, way: str) -> int:
        """Processes of every host."""
        if len(set(self.processes)) > 1:
            raise UsageError(
                f"hosts of {', '.join(map(str, self.processes))} devices, and --for {way} starts as many on each",
                mend="Write --for torchrun, which gives each host a line of its own",
            )
        return self.processes[0]


def _label(name: str) -> str:
    """A name as DNS takes it of a service: lower case letters, digits and hyphens, a letter first, 63 at most."""
    found = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return (found if found[:1].isalpha() else f"pdv-{found}")[:50].strip("-")


def _line(name: str) -> str:
    """A name where the end of a line would end what it is part of."""
    return "".join(letter if letter.isprintable() else "_" for letter in name)


def _import_folder(directory: Path) -> str:
    """The folder in which a script finds the package.

    Raises:
        UsageError: if a list of folders cannot have it.
    """
    folder = str(directory.resolve().parent)
    if os.pathsep in folder:
        what = f"{folder!r} cannot be in PYTHONPATH, by which a script finds the package"
        raise UsageError(what, f"Folders without {os.pathsep!r}, which is between two of them", "Move the package")
    return folder


def read_launch(
    directory: Path, script: Path, arguments: Sequence[str], hosts: Sequence[str] = (), port: int = PORT
) -> Launch:
    """How to start ``script``, which imports the package in ``directory``, on what its plan was made for.

    Raises:
        UsageError: if there is no such package or script, or ``hosts`` are others than the cluster's in number.
        VerificationError: if plan.json is damaged.
    """
    document = read_document(directory)
    if not (directory / "model.py").is_file():
        raise UsageError(f"{directory} has no model.py", mend="Plan a model with weights, and write its package")
    if not script.is_file():
        raise UsageError(f"there is no script {str(script)!r}", mend="Name the file that torchrun shall run")
    with refusing():
        cluster = Cluster.from_dict(document["cluster"])
    processes = tuple(group.devices for group in cluster.nodes for _ in range(group.count))
    if hosts and len(hosts) != len(processes):
        what = f"{len(hosts)} hosts: {', '.join(hosts)}"
        raise UsageError(
            what, f"{cluster.name} has {len(processes)}", "Name each once, in the order of the cluster file"
        )
    if not all(HOST.fullmatch(name) for name in hosts):
        raise UsageError(f"hosts are {', '.join(map(repr, hosts))}", "Names or addresses", "Write --hosts a,b")
    on_gpus = all(entry.device.kind == "gpu" for entry in cluster.classes)
    environment = {"PYTHONPATH": _import_folder(directory)}
    if not on_gpus:
        environment["OMP_NUM_THREADS"] = "1"  # a process is a core
    names = tuple(hosts) or tuple(f"HOST{number}" for number in range(len(processes)))
    words = str(script), *arguments
    return Launch(directory.resolve().name, processes, environment, words, names, port, on_gpus)


def own_environment(launch: Launch) -> dict[str, str]:
    """Of a process started here: what is set already stays, and the package's folder comes first among imports."""
    path = os.pathsep.join(filter(None, (launch.environment["PYTHONPATH"], os.environ.get("PYTHONPATH"))))
    return {**launch.environment, **os.environ, "PYTHONPATH": path}
