"""Packages as modules: one of a name in a process, and what lies in a folder now."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from pdv.plan.package import import_package
from tests.pdv.test_compile import planned

NAME = "pdv_tests_of_a_name"


def test_a_package_written_in_the_place_of_another_is_imported_anew(tmp_path: Path) -> None:
    folder = planned("two", {"dp": 2}).save(tmp_path / "two_pdv")
    first = import_package(folder)
    assert import_package(folder).Model is first.Model
    planned("two", {"tp": 2}).save(folder, overwrite=True)
    assert "tp=2" in import_package(folder).model.__doc__
    assert "dp=2" in first.model.__doc__


def test_another_package_of_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds the modules of the first one, by their names, and would build it."""
    first = planned("two", {"dp": 2}).save(tmp_path / "first" / NAME)
    other = Path(shutil.copytree(first, tmp_path / "other" / NAME))
    monkeypatch.syspath_prepend(first.parent)
    try:
        importlib.import_module(NAME)
        monkeypatch.syspath_prepend(other.parent)
        del sys.modules[NAME]
        with pytest.raises(ImportError, match=rf"other-package: {NAME} is imported from {other}, .* from {first}"):
            importlib.import_module(NAME)
        for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
            del sys.modules[name]
        assert Path(importlib.import_module(NAME).model.__file__).parent == other
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
            del sys.modules[name]


def test_a_package_behind_a_link_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planned("two", {"dp": 2}).save(tmp_path / "two_pdv")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / f"{NAME}_linked").symlink_to(folder)
    monkeypatch.syspath_prepend(tmp_path / "linked")
    try:
        assert importlib.import_module(f"{NAME}_linked").build(device="cpu")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == f"{NAME}_linked"]:
            del sys.modules[name]
