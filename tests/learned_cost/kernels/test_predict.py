"""Kernels that the weights are asked about as others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from learned_cost.data.kernel import Kernel, Subgraph
from learned_cost.devices.device import load_records
from learned_cost.kernels.predict import Predictor, stand_in

SIZE = {"m": 8192, "n": 50304}
SOFTMAX = Kernel("softmax", "row", "bf16", SIZE, (8192, 1, 50304, 1), 5.0 * 8192 * 50304, 4.0 * 8192 * 50304, "forward")


def test_rows_of_a_type_that_was_never_seen_are_asked_as_half_of_them_in_float32() -> None:
    asked = stand_in(SOFTMAX, {"softmax": ["fp32"]})
    assert (asked.dtype, asked.dims["m"], asked.dims["n"]) == ("fp32", 4096, 50304)
    assert (asked.extents, asked.bytes) == ((4096, 1, 50304, 1), SOFTMAX.bytes)


@pytest.mark.parametrize("types", [{}, {"softmax": ["fp16", "fp32"]}, {"softmax": ["bf16"]}, {"layernorm": ["fp32"]}])
def test_others_are_asked_as_they_are(types: dict[str, list[str]]) -> None:
    assert stand_in(SOFTMAX, types) is SOFTMAX


def test_half_the_bytes_take_no_longer() -> None:
    """Of the shipped weights, whose data has softmax in float32 alone, at a vocabulary's length."""
    whole = replace(SOFTMAX, dtype="fp32", bytes=2 * SOFTMAX.bytes)
    predictor, device = Predictor.load(), load_records()["H100-SXM-80GB"]
    narrow, wide = predictor.predict([Subgraph.of(SOFTMAX), Subgraph.of(whole)], device).mean_log_s
    assert narrow < wide
