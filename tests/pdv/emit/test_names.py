"""Names from strangers become identifiers and literals that mean the same."""

from __future__ import annotations

import ast
import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.builder import Builder
from pdv.emit.analysis.names import MAX_IDENTIFIER, identifier, plain, string, unique
from pdv.emit.program.classes import attribute_names
from tests.pdv.worlds import f32

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


ROLES = [
    # as much as tells them apart, the same of siblings; no numbers of layers, no model around them
    (["transformer.wpe.weight", "transformer.ln_f.weight", "lm_head.weight"], "wpe ln_f lm_head"),
    (["h.11.ln_1.weight", "h.11.attn.c_attn.weight", "h.11.attn.c_proj.weight", "h.11.mlp.c_proj.weight"],
     "ln_1 attn_c_attn attn_c_proj mlp_c_proj"),
    (["h.0.ln.weight", "h.11.ln.weight", "ln_f.weight"], "h_0_ln h_11_ln ln_f"),
    (["norm.weight", "encoder.norm.weight"], "norm encoder_norm"),
    (["layers.0.weight", "layers.2.weight"], "layers_0 layers_2"),
    (["self_attn.q_proj_k_proj_v_proj.weight", "mlp.gate_proj_up_proj.weight"], "qkv_proj gate_up_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "roles"), ROLES)
def test_attributes_are_named_by_role(names: list[str], roles: str) -> None:
    k = Builder()
    params = [k.param(name, f32(2)) for name in names]
    found = attribute_names(params, "")
    assert [found[param] for param in params] == [f"{role}_weight" for role in roles.split()]


def test_what_lies_in_no_module_keeps_its_name() -> None:
    k = Builder()
    params = [k.param(name, f32(2)) for name in ("stem.weight.folded", "stem.bias", "qkv.weight.0", "scale")]
    found = attribute_names(params, "")
    assert list(found.values()) == ["stem_weight_folded", "stem_bias", "qkv_weight_0", "scale"]
