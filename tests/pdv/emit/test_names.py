"""Names from strangers become identifiers and literals that mean the same."""

from __future__ import annotations

import ast
import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdv.emit.analysis.names import MAX_IDENTIFIER, identifier, plain, string, unique

HOSTILE = [
    "",
    "class",
    "match",
    "1x",
    'a"b',
    "a'b",
    "a\nb",
    "a\\",
    '"""',
    "{x}",
    "né",
    "a.b-c d",
    "x" * 300,
    "__",
    "None",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_identifiers_are_identifiers(text: str) -> None:
    name = identifier(text)
    assert name.isidentifier()
    assert name.isascii()
    assert not keyword.iskeyword(name)
    assert len(name) <= MAX_IDENTIFIER + len("value_")


def test_identifiers_keep_the_last_whole_words() -> None:
    name = identifier("resnet.encoder.stages.0.layers.1.layer.2.convolution.weight")
    assert name == "stages_0_layers_1_layer_2_convolution_weight"


@given(st.text())
def test_string_literals_mean_their_text(text: str) -> None:
    literal = string(text)
    assert ast.literal_eval(literal) == text
    assert literal.isascii()
    assert "\n" not in literal


@given(st.text())
def test_plain_text_ends_no_docstring(text: str) -> None:
    assert ast.literal_eval(f'"""{plain(text)} """') == f"{plain(text)} "


def test_taken_names_are_numbered() -> None:
    assert unique("x", ["x", "x_2"]) == "x_3"
