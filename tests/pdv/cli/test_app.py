"""The command line: exit codes, one error each, one JSON object, hints for mistyped words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest

from ir.errors import (
    ClusterError,
    ModelError,
    NoPlanFitsError,
    PdvError,
    UnsupportedOperatorsError,
    UsageError,
    VerificationError,
)
from pdv.cli import app as cli
from pdv.cli import doctor
from pdv.cli.long.progress import progress_bar
from tests.conftest import Golden

ROOT = Path(__file__).parents[3]
LAPTOP = str(ROOT / "examples/clusters/laptop-4.yaml")

# name -> words; what is printed is tests/golden/errors/cli-<name>.txt
WRONG = {
    "command": ["optimise"],
    "command-far": ["frobnicate"],
    "subcommand": ["cluster", "shw"],
    "subcommand-missing": ["cluster"],
    "rules-command-missing": ["rules"],
    "seed": ["optimize", "m.onnx", "--cluster", LAPTOP, "--seed", "-1"],
    "option": ["optimize", "m.onnx", "--clster", "x"],
    "option-of-another": ["optimize", "m.onnx", "--manual", "tp=2"],
    "argument-missing": ["optimize"],
    "cluster-missing": ["optimize", "m.onnx"],
    "batch-zero": ["optimize", "m.onnx", "--cluster", LAPTOP, "--batch", "0"],
    "batch-text": ["optimize", "m.onnx", "--cluster", LAPTOP, "--batch", "many"],
    "mode": ["optimize", "m.onnx", "--cluster", LAPTOP, "--mode", "trian"],
    "dtype": ["optimize", "m.onnx", "--cluster", LAPTOP, "--dtype", "bf17"],
    "memory-limit": ["optimize", "m.onnx", "--cluster", LAPTOP, "--memory-limit", "70"],
    "mesh": ["optimize", "m.onnx", "--cluster", LAPTOP, "--mesh", "x=2,x=2"],
    "output-name": ["optimize", "m.onnx", "--cluster", LAPTOP, "-o", "gpt-2"],
    "output-shadows": ["optimize", "m.onnx", "--cluster", LAPTOP, "-o", "torch"],
    "output-exists": ["optimize", "m.onnx", "--cluster", LAPTOP, "-o", "full"],
    "output-parent": ["optimize", "m.onnx", "--cluster", LAPTOP, "-o", "absent/there"],
    "budget": ["optimize", "m.onnx", "--cluster", LAPTOP, "--budget", "5sec"],
    "budget-zero": ["optimize", "m.onnx", "--cluster", LAPTOP, "--budget", "0s"],
    "search": ["optimize", "m.onnx", "--cluster", LAPTOP, "--search", "backtrak"],
    "pins-file": ["optimize", "m.onnx", "--cluster", LAPTOP, "--pins", "absent.yaml"],
    "cluster-file": ["optimize", "m.onnx", "--cluster", "absent.yaml"],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words(name: str, here: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    before = sorted(here.rglob("*"))
    code = cli.run(WRONG[name])
    printed = capsys.readouterr()
    assert code == (5 if name == "cluster-file" else 2)
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert sorted(here.rglob("*")) == before
    golden(f"errors/cli-{name}.txt", printed.err)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("a"), ModelError("a"), UnsupportedOperatorsError(("aten.foo at f.py:1", "aten.bar at f.py:2")),
        ClusterError("a"), NoPlanFitsError("a"), VerificationError("a"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_one_message_and_its_code(
    error: PdvError, as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(description: object) -> None:
        raise error

    monkeypatch.setattr("pdv.cluster.load_cluster", fail)
    code = cli.run(["cluster", "show", "x.yaml", *(["--json"] if as_json else [])])
    printed = capsys.readouterr()
    assert code == error.exit_code
    if as_json:
        assert printed.err == ""
        content = json.loads(printed.out)
        assert content["format_version"] == 1
        assert content["error"] == {"slug": error.slug, "message": str(error), "exit_code": code}
    else:
        assert printed.out == ""
        assert printed.err == f"error: {error}\n"


def test_our_own_fault_is_70_and_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(description: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("pdv.cluster.load_cluster", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.run(["cluster", "show", "x.yaml"]) == 70
    printed = capsys.readouterr().err
    assert printed.startswith("error: internal-error: KeyError at test_app.py:")
    assert printed.count("\n") == 1
    (report,) = (tmp_path / "pdv" / "reports").iterdir()
    assert f"Please report it, with what lies in {report} (the traceback)." in printed
    assert "surprise" in (report / "traceback.txt").read_text()
    assert cli.run(["cluster", "show", "x.yaml", "--json"]) == 70
    assert json.loads(capsys.readouterr().out)["error"]["report"].startswith(str(tmp_path))
    assert cli.run(["cluster", "show", "x.yaml", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_interrupting_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(description: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdv.cluster.load_cluster", interrupt)
    assert cli.run(["cluster", "show", "x.yaml"]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert cli.run(["cluster", "show", "x.yaml", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["slug"] == "interrupted"


@pytest.mark.parametrize("command", ["verify", "explain"])
def test_what_is_no_package_is_named(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "absent", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == command  # the words after it are not part of it
    assert "absent is no directory" in told["error"]["message"]
    assert cli.run([command, "full"]) == 2
    assert "full has no plan.json" in capsys.readouterr().err


def test_show_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["cluster", "show", LAPTOP, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["format_version"], content["command"]) == (1, "cluster show")
    assert content["cluster"]["num_devices"] == 4
    assert content["meshes"] == [{"core": 4}, {"core0": 2, "core1": 2}]


def test_show_prints_a_table(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert cli.run(["cluster", "show", str(ROOT / "examples/clusters/2x8-a100.yaml")]) == 0
    golden("cli/cluster-show-2x8-a100.txt", capsys.readouterr().out)


def test_a_reader_that_leaves_early_meets_no_traceback() -> None:
    command = f"{sys.executable} -m pdv cluster show {LAPTOP} --json | true"
    result = subprocess.run(command, shell=True, check=True, cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == ""


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        with progress_bar(quiet=quiet) as progress:
            progress("searching", 0.5)
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""


def test_doctor_says_what_is_missing_for_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "pyarrow" else known(name))
    assert cli.run(["doctor"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "pyarrow" in line)
    assert line.split() == [
        "note",
        "pyarrow",
        *["absent;", "only", "for", "training", "the", "cost", "model", "(pdv", "cost", "train)"],
    ]


def test_doctor_names_nccl_and_cuda(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert cli.run(["doctor"]) == 0
    assert "backends nccl 2.27.5 (CUDA " in capsys.readouterr().out


def test_doctor_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert cli.run(["doctor", "--json"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["torch"]["state"] == "ok"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[>=]", name)[0].lower() for name in needed} <= {name.lower() for name in findings}


def documented() -> dict[str, str]:
    """Commands of docs/errors.md, and the error that each is said to give."""
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^    \$ (pdv .*)\n((?:    .+\n)+)", page, re.MULTILINE)
    return {words: " ".join(text.split()) for words, text in blocks}


@pytest.mark.parametrize("words", [words for words in documented() if "--pins" not in words])
def test_errors_are_as_documented(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = "{bandwidth: 450 gb/s, latency: 1 us}" if "show" in words else "nvlink3"
    if "--devices mine" in words:
        record = (ROOT / "learned_cost/devices/T4.yaml").read_text(encoding="utf-8")
        (here / "mine").mkdir()
        (here / "mine" / "fast.yaml").write_text(re.sub(r"(?m)^l2_bytes: .*$", "l2_bytes: 0", record))
    if "gpt2.onnx" in words:
        write_open_model(here / "gpt2.onnx")
    (here / "cluster.yaml").write_text(f"nodes:\n  - devices: 8\n    device: a100-80gb-sxm\n    link: {link}\n")
    assert cli.run(words.split()[1:]) in (2, 3, 5, 8)
    assert capsys.readouterr().err.strip() == documented()[words]


def write_open_model(path: Path) -> None:
    """A model that leaves its batch and its sequence length open."""
    ids = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.FLOAT, ["batch", "sequence"])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", "sequence"])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["input_ids"], ["y"])], "gpt2", [ids], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), path)


def test_errors_are_documented() -> None:
    assert len(documented()) >= 5
