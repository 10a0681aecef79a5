"""YAML reads as it looks (1.2), what is written reads the same by either version, and there is one place for both."""

from __future__ import annotations

import pytest
import yaml

from ir.files.plain_yaml import compose_yaml, dump_yaml, load_yaml, scalar
from tests.structure import modules

PLACE = "ir.files.plain_yaml"


@pytest.mark.parametrize("text", ["1:30", "on", "Off", "yes", "NO", "1_000", "0b11", "2024-01-01", "=", "190:20:30.15"])
def test_what_yaml_1_1_takes_for_something_else_is_text(text: str) -> None:
    assert load_yaml(f"value: {text}") == {"value": text}
    node = compose_yaml(text)
    assert node is not None
    assert scalar(node) == text


def test_values_of_the_core_schema() -> None:
    text = "[010, 0o10, 0x1F, +12, 1e3, .5, -.INF, true, FALSE, ~, Null, '10', -0]"
    assert load_yaml(text) == [10, 8, 31, 12, 1000.0, 0.5, float("-inf"), True, False, None, None, "10", 0]
    assert load_yaml("a:\n<<: 2\n") == {"a": None, "<<": 2}


def test_texts_are_written_so_that_both_versions_read_them() -> None:
    texts = ("1:30", "on", "1e3", "0o10", "010", "2024-01-01", "~", "", "plain")
    data = {f"k{i}": text for i, text in enumerate(texts)} | {"number": 1e20, "truth": True, "none": None}
    assert load_yaml(dump_yaml(data)) == data == yaml.safe_load(dump_yaml(data))


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="'a' is given twice"):
        load_yaml("a: 1\na: 2\n")


def test_nothing_else_reads_or_writes_yaml() -> None:
    others = [module for name, module in modules().items() if name != PLACE]
    words = ("yaml.load", "yaml.safe_", "yaml.full_load", "yaml.compose", "yaml.dump", "SafeLoader", "SafeDumper")
    assert [module.where for module in others if any(word in module.text for word in words)] == []
