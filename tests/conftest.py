"""What every test may use: golden files, rewritten by `pytest --update-golden`."""

from __future__ import annotations

import gc
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("pdv", deadline=None)  # how long an example takes, load decides
settings.load_profile("pdv")

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden with what the code prints now")


ALL_ON_PROCESSES = re.compile(r"^pytestmark = pytest\.mark\.distributed$", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files are not imported of which no test is asked for: those on processes, or all but those."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    asked, text = str(config.option.markexpr), collection_path.read_text(encoding="utf-8")
    if asked.startswith("not distributed"):
        return True if ALL_ON_PROCESSES.search(text) else None
    return True if asked.startswith("distributed") and "distributed" not in text else None


def pytest_collection_finish() -> None:
    """What there is by now stays: looking through it for what can go takes a tenth of the tests' time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws is the same whichever ran before it, in its process."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    for value in vars(getattr(item, "module", None) or object).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.fixture(autouse=True, scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for keys of the user's own, in place of the one of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def composites() -> Iterator[None]:
    """torch lists every composite operator anew, for a tenth of a second, whenever it decomposes a program, and makes
    each ready for twelve kinds of devices. These tests decompose hundreds; here it lists them again where an operator
    has come since, for kinds of devices that tests use.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch
    from torch._export.utils import _collect_all_valid_cia_ops
    from torch.export import decomp_utils, exported_program

    from pdv.frontend.torch.decomposed import _KEYS, _keys_of

    known: dict[tuple[str, ...], Any] = {}

    def collect() -> Any:
        there = tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if there not in known:
            known.clear()
            known[there] = _collect_all_valid_cia_ops()
        return known[there]

    with pytest.MonkeyPatch.context() as patch:
        for module in (decomp_utils, exported_program):
            patch.setattr(module, "_collect_all_valid_cia_ops", collect)
        for name in _KEYS:
            patch.setattr(exported_program, name, _keys_of({"CPU", "CUDA", "META"}, getattr(exported_program, name)))
        yield


@pytest.fixture(autouse=True, scope="session")
def translations() -> Iterator[None]:
    """torch reads all that it knows of ONNX anew for each export, which is most of a small one; here, once."""
    if "torch" not in sys.modules:
        yield
        return
    module: Any = import_module("torch.onnx._internal.exporter._registration")  # Any: it has no public name
    read = cache(module.ONNXRegistry.from_torchlib)

    def copied(*opset: int, **named: int) -> Any:
        known, own = read(*opset, **named), module.ONNXRegistry()
        own.__dict__ |= known.__dict__
        own.functions = {target: [*found] for target, found in known.functions.items()}
        return own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden("errors/x.txt", text)`: the text equals the stored one."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}; pytest --update-golden writes it"
        assert text == path.read_text(encoding="utf-8")

    return check
