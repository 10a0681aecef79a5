"""Whatever a command fails by, `--json` prints one object with an error of slug, message and exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from pdv.cli import app as cli
from pdv.cli import doctor
from tests.structure import modules

LAPTOP = str(Path(__file__).parents[3] / "examples/clusters/laptop-4.yaml")
BAD = "nodes:\n  - {devices: none, device: t5}\n"

# command -> (words, exit code)
FAILING = {
    "optimize": (["m.onnx", "--cluster", "bad.yaml"], 5),
    "plan": (["jobs.yaml"], 11),
    "verify": (["absent"], 2),
    "explain": (["absent"], 2),
    "report": (["absent"], 2),
    "simulate": (["--arch", "gpt2", "--cluster", "bad.yaml"], 5),
    "diff": (["absent", "absent"], 2),
    "export": (["absent", "--to", "json"], 2),
    "import": (["absent.json", "--arch", "gpt2", "--cluster", LAPTOP], 2),
    "launch": (["absent", "train.py"], 2),
    "bench": (["absent"], 2),
    "reshard": (["absent", "-o", "there"], 8),
    "cluster show": (["bad.yaml"], 5),
    "cluster validate": (["bad.yaml"], 5),
    "cluster devices": (["extra"], 2),
    "cluster detect": (["--from", "bad.yaml"], 5),
    "cluster bench": (["bad.yaml", "-o", "there.yaml"], 5),
    "doctor": ([], 2),
    "rules check": (["absent.laws"], 2),
    "rules list": (["extra"], 2),
    "rules generate": (["--max-ops", "7"], 2),
    "profile": (["--budget", "soon"], 2),
    "cost train": (["--data", "absent"], 2),
    "cost adapt": (["--data", "absent", "-o", "there"], 8),
    "cost publish": (["absent", "-o", "there"], 8),
    "cost show": (["absent"], 8),
    "cost evaluate": (["--data", "absent"], 8),
}


def commands(group: typer.Typer, before: str = "") -> Iterator[str]:
    """All of them, by the words that call them."""
    for each in group.registered_commands:
        assert each.callback is not None
        yield before + (each.name or each.callback.__name__.rstrip("_").replace("_", "-"))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, f"{inner.name} ")


def test_every_command_is_failed_here() -> None:
    assert sorted(FAILING) == sorted(commands(cli.app))


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_one_object(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "REQUIRED", ("absent-package",))
    (tmp_path / "bad.yaml").write_text(BAD)
    (tmp_path / "jobs.yaml").write_text("jobs:\n  - {name: one, model: absent.onnx, cluster: bad.yaml}\n")
    words, exit_code = FAILING[name]
    assert cli.run([*name.split(), *words, "--json"]) == exit_code
    told = json.loads(capsys.readouterr().out)
    assert (told["format_version"], told["command"]) == (1, name)
    assert set(told["error"]) == {"slug", "message", "exit_code"}
    assert told["error"]["exit_code"] == exit_code
    assert told["error"]["message"].startswith(f"{told['error']['slug']}: ")


def test_one_place_ends_commands_with_an_exit_code() -> None:
    """Beside ``launch --run``, which has none of its own to print, and ``--version``."""
    ends = [module.where for module in modules().values() if re.search(r"typer\.Exit\(|sys\.exit\(", module.text)]
    assert ends == ["pdv/cli/app.py", "pdv/cli/launch.py", "pdv/cli/output.py"]


@pytest.mark.parametrize(
    "words",
    [
        ["explain", ""],
        ["report", "--quick", ""],
        ["simulate", "there", "--trace", ""],
        ["simulate", "there", "--trace="],
        ["bench", "there", "-o", ""],
        ["profile", "--device", "cpu", "--output="],
        ["cost", "adapt", "--data", "", "-o", "x"],
        ["diff", "there", ""],
    ],
)
def test_a_path_that_is_empty_is_not_this_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(words) == 2
    assert " is empty. A path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["launch", "absent", "train.py", "--", ""], ["cluster", "detect", "--name", "", "--x"]]
)
def test_other_words_may_be_empty(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    assert "is empty" not in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_is_no_name_of_weights(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["cost", "adapt", "--data", str(tmp_path), "-o", name]) == 2
    assert f"'{name}' is a folder. Name the weights in it" in capsys.readouterr().err


def test_a_cost_model_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["simulate", "--arch", "gpt2", "--batch", "8", "--cluster", LAPTOP, "--cost", ""]) == 2
    assert "--cost: '' is no cost model" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile --device cpu", "bench there"])
def test_measurements_are_kept_in_folders(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.run([*command.split(), "-o", str(tmp_path / "file")]) == 2
    assert "is a file. Choose another name" in capsys.readouterr().err
