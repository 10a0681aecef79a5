"""What `pdv launch` prints starts as many processes as the plan has, host by host; what it runs passes its code on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdv.cli import app as cli
from pdv.cluster import load_cluster
from pdv.cluster.routing.arrangements import arranged
from pdv.plan.seal import FORMAT_VERSION, write_document

CPU: dict[str, Any] = {"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}
NETWORK = {"name": "port", "bandwidth": "1 Gb/s", "latency": "50 us"}
GPUS: dict[str, Any] = {"devices": 8, "device": "a100-80gb-sxm", "link": "nvlink3", "count": 2}
ARGUMENTS = ["--name", "it's 3"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a plan of a cluster, and a script, into the folder where commands run."""
    monkeypatch.chdir(tmp_path)

    def write(*nodes: dict[str, Any], network: object = NETWORK, places: Sequence[int] = ()) -> None:
        several = len(nodes) > 1 or nodes[0].get("count", 1) > 1
        cluster = load_cluster({"name": "c", "nodes": list(nodes), **({"network": network} if several else {})})
        cluster = arranged(cluster, tuple(places))
        Path("gpt_2_pdv").mkdir()
        write_document(Path("gpt_2_pdv"), {"format_version": FORMAT_VERSION, "cluster": cluster.as_dict()})
        Path("gpt_2_pdv/model.py").write_text("")
        Path("train.py").write_text("")

    return write


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.run(["launch", "gpt_2_pdv", "train.py", *words])
    printed = capsys.readouterr()
    assert code == 0, printed
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(["launch", "gpt_2_pdv", "train.py", *words]) == 2
    return capsys.readouterr().err


def test_one_host(package: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    package(CPU)
    comment, line = told(capsys, "--", *ARGUMENTS).splitlines()
    assert comment == "# HOST0: ranks 0 to 1"
    environment = [f"PYTHONPATH={tmp_path}", "OMP_NUM_THREADS=1"]
    words = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", *ARGUMENTS]
    assert shlex.split(line) == [*environment, *words]


def test_unequal_hosts_have_a_line_each(package: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    package(GPUS, {**GPUS, "count": 1, "devices": 4}, network="ib-hdr")
    lines = told(capsys, "--hosts", "a,b,c", "--port", "1234").splitlines()
    assert lines[::2] == ["# a: ranks 0 to 7", "# b: ranks 8 to 15", "# c: ranks 16 to 19"]
    words = shlex.split(lines[5])
    assert words[1:] == [
        "torchrun", "--nnodes=3", "--node-rank=2", "--nproc-per-node=4", "--master-addr=a", "--master-port=1234",
        "train.py",
    ]  # fmt: skip
    assert "--for torchrun" in refused(capsys, "--for", "slurm")
    assert "--for torchrun" in refused(capsys, "--for", "kubernetes")


def test_hosts_are_named_as_listed_whatever_stages_they_have(
    package: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    package(GPUS, {**GPUS, "count": 1, "devices": 4}, network="ib-hdr", places=[*range(10, 20), *range(10)])
    lines = told(capsys, "--hosts", "a,b,c").splitlines()
    assert lines[::2] == ["# a: ranks 0 to 7", "# b: ranks 8 to 15", "# c: ranks 16 to 19"]


def test_slurm_starts_torchrun_on_each_node(
    package: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Run with stand-ins of Slurm's commands and of torchrun."""
    package(GPUS, network="ib-hdr")
    text = told(capsys, "--for", "slurm", "--", *ARGUMENTS)
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    stand_ins = {
        "scontrol": "printf 'first\\nsecond\\n'",
        "srun": 'shift; for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done',
        "torchrun": 'printf "%s|" "$@"; echo',
    }
    for name, body in stand_ins.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "any"}
    run = subprocess.run(["bash", "-c", text], check=True, env=environment, capture_output=True, text=True)
    rest = ["--master-addr=first", "--nnodes=2", "--nproc-per-node=8", "--master-port=29500", "train.py", *ARGUMENTS]
    assert [line.split("|")[:-1] for line in run.stdout.splitlines()] == [
        [f"--node-rank={rank}", *rest] for rank in (0, 1)
    ]


def test_kubernetes_has_a_pod_for_each_host(package: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    package(GPUS, network="ib-hdr")
    text = told(capsys, "--for", "kubernetes", "--", *ARGUMENTS)
    service, job = (json.loads(part) for part in text.split("---\n")[1:])
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == ("gpt-2-pdv", "None")
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == [
        "torchrun", "--nnodes=2", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=gpt-2-pdv-0.gpt-2-pdv", "--master-port=29500", "train.py", *ARGUMENTS,
    ]  # fmt: skip
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_kubernetes_hands_dollars_on_and_is_given_a_name_that_it_takes(
    package: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads ``$$`` as one, and ``$(NAME)`` as a variable; names of services are labels of DNS."""
    package(GPUS, network="ib-hdr")
    Path("gpt_2_pdv").rename("2 Größen.v1_pdv")
    arguments = ["--", "$(PYTHONPATH)", "a$$b", "$"]
    assert cli.run(["launch", "2 Größen.v1_pdv", "train.py", "--for", "kubernetes", *arguments]) == 0
    service, job = (json.loads(part) for part in capsys.readouterr().out.split("---\n")[1:])
    assert service["metadata"]["name"] == job["metadata"]["name"] == "pdv-2-gr-en-v1-pdv"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-3:] == ["$$(PYTHONPATH)", "a$$$$b", "$$"]
    assert cli.run(["launch", "2 Größen.v1_pdv", "train.py", "--for", "slurm"]) == 0
    assert "#SBATCH --job-name='2 Größen.v1_pdv'\n" in capsys.readouterr().out


def test_what_is_missing_is_told(package: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    package({**CPU, "count": 2})
    assert "2 hosts, with no --node-rank and without --hosts" in refused(capsys, "--run")
    assert "--node-rank 2" in refused(capsys, "--run", "--hosts", "a,b", "--node-rank", "2")
    assert "1 hosts: a. c has 2" in refused(capsys, "--hosts", "a")
    assert "Allowed: torchrun, slurm, kubernetes" in refused(capsys, "--for", "mpi")
    Path("train.py").unlink()
    assert "there is no script 'train.py'" in refused(capsys)
    Path("gpt_2_pdv/model.py").unlink()
    assert "no model.py" in refused(capsys)


@pytest.mark.distributed
def test_what_it_runs_has_the_ranks_and_passes_its_code_on(
    package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(CPU)
    Path("gpt_2_pdv/__init__.py").write_text("")
    Path("train.py").write_text(
        "import os, pathlib, sys\nimport gpt_2_pdv\n"
        "rank = os.environ['RANK']\npathlib.Path(f'{rank}.txt').write_text(os.environ['WORLD_SIZE'] + sys.argv[1])\n"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert cli.run(["launch", "--run", "gpt_2_pdv", "train.py", "--", "!"]) == 0
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["2!", "2!"]
    Path("train.py").write_text("raise SystemExit(3)\n")
    assert cli.run(["launch", "--run", "gpt_2_pdv", "train.py"]) == 1  # torchrun's, where a process failed


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_it_runs_ends_with_it(
    number: signal.Signals, package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(CPU)
    Path("train.py").write_text(
        "import os, pathlib, time\nout = pathlib.Path(os.environ['RANK'])\nout.write_text(str(os.getpid()))\n"
        "out.rename(out.name + '.pid')\ntime.sleep(120)\n"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    words = [sys.executable, "-m", "pdv", "launch", "--run", "gpt_2_pdv", "train.py"]
    places = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
    # in a session of its own, away from a terminal, and told alone
    with subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL) as started:
        while not all(place.exists() for place in places):
            assert started.poll() is None
            time.sleep(0.1)
        started.send_signal(number)
        assert started.wait(60) != 0
    for place in places:
        with pytest.raises(ProcessLookupError):
            os.kill(int(place.read_text()), 0)


def test_a_name_of_two_lines_is_one_in_a_batch_script(
    package: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    package(CPU)
    Path("gpt_2_pdv").rename("two\nlines")
    assert cli.run(["launch", "two\nlines", "train.py", "--for", "slurm"]) == 0
    assert "#SBATCH --job-name=two_lines\n" in capsys.readouterr().out


def test_hosts_are_names(package: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    package(GPUS)
    for hosts in ("a b,c", "a;b,c", "a\nb,c", "a,"):
        assert "Names or addresses" in refused(capsys, "--hosts", hosts)
    assert "[fe80::1%eth0]" in told(capsys, "--hosts", "a-1.b_c,[fe80::1%eth0]")


def test_a_folder_that_no_list_of_folders_can_have(
    package: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    package(CPU)
    Path("a:b").mkdir()
    Path("gpt_2_pdv").rename("a:b/gpt_2_pdv")
    assert cli.run(["launch", "a:b/gpt_2_pdv", "train.py"]) == 2
    assert "cannot be in PYTHONPATH" in capsys.readouterr().err
