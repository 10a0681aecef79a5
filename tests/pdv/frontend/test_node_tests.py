"""A few of onnx's own node tests for each family of readers, planned and run on two simulated ranks.

All of them: ``python benchmarks/coverage.py --parts nodes``.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.coverage_runs import gradients
from benchmarks.coverage_runs.gradients import NOTHING, READING, REFERENCE, run_gradients
from benchmarks.coverage_runs.nodes import cases
from benchmarks.coverage_runs.running import Case, run_case

PASSING = (
    "bernoulli", "acos", "asinh", "mod_mixed_sign_float32", "clip_example", "max_two_inputs",
    "argmax_keepdims_example", "hardmax_axis_1", "reduce_prod_keepdims_random", "cumprod_1d", "onehot_without_axis",
    "averagepool_1d_default", "averagepool_2d_same_lower", "averagepool_3d_default", "maxpool_2d_ceil",
    "convtranspose_pads", "convtranspose_autopad_same", "lppool_2d_pads", "lrn",
    "instancenorm_epsilon", "resize_upsample_scales_linear", "resize_upsample_sizes_nearest", "dft",
    "cumsum_1d_reverse",
    "scatter_elements_with_axis", "gather_elements_negative_indices", "gather_negative_indices", "edge_pad", "tile",
    "layer_normalization_3d_axis1_epsilon", "elu", "sce_mean", "nllloss_NCd1d2", "attention_4d_softcap",
    "attention_4d_softcap_neginf_mask",
    "attention_4d_gqa", "lstm_with_peepholes", "gru_batchwise", "simple_rnn_bidirectional", "flatten_negative_axis1",
    "pow_types_float32_int64", "pow_types_int32_float32", "mod_mixed_sign_int8", "mod_float_edge_cases_fmod_0_float32",
    "div_int32_trunc", "add_uint16", "cast_FLOAT_to_FLOAT8E5M2", "castlike_FLOAT16_to_FLOAT8E4M3FNUZ_expanded",
    "quantizelinear_axis", "dequantizelinear_blocked", "qlinearmatmul_2D_uint8_float32", "dynamicquantizelinear",
    "qlinearconv", "matmulinteger", "stft", "dft_inverse", "scatternd_add", "scatter_elements_with_reduction_max",
    "col2im", "einsum_batch_diagonal", "einsum_sum", "resize_tf_crop_and_resize", "reduce_max_empty_set", "isnan",
    "hannwindow_symmetric", "range_float_type_positive_delta_expanded", "simple_rnn_batchwise", "eyelike_with_dtype",
    "top_k_smallest", "top_k_same_values", "gridsample_bilinear", "det_nd", "maxpool_with_argmax_2d_precomputed_pads",
    "maxunpool_export_without_output_shape", "bitwise_and_i32_2d", "convtranspose_3d", "tensorscatter_circular",
    "shrink_hard", "einsum_inner_prod",
    "deform_conv_with_mask_bias", "deform_conv_with_multiple_offset_groups", "roialign_aligned_true",
    "bitwise_not_4d", "training_dropout_mask", "onehot_with_axis", "resize_downsample_scales_linear_align_corners",
    "attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "attention_4d_with_qk_matmul", "rotary_embedding_expanded", "castlike_DOUBLE_to_FLOAT",
)  # fmt: skip
TRAINED = {  # with their inputs as parameters
    "add_bcast": REFERENCE, "attention_3d_causal": REFERENCE, "conv_with_strides_padding": REFERENCE,
    "layer_normalization_3d_axis1_epsilon": REFERENCE, "gather_0": REFERENCE, "gridsample_bilinear": READING,
    "resize_upsample_scales_linear": REFERENCE, "training_dropout_default": READING, "argmax_keepdims_example": NOTHING,
    "lstm_with_peepholes": REFERENCE, "sce_mean": REFERENCE,
    "cast_FLOAT_to_FLOAT8E4M3FNUZ": READING, "deform_conv_with_mask_bias": READING,
}  # fmt: skip
REFUSED = {
    "maxpool_2d_uint8": "a maximum over windows of u8",
    "identity_opt": "is no tensor",
    "cast_no_saturate_FLOAT_to_FLOAT8E4M3FN": "whose ends torch does not mark",
}


@cache
def known() -> dict[str, Case]:
    return {case.name.removeprefix("test_"): case for case in cases()}


@pytest.mark.parametrize("name", PASSING)
def test_passes_on_two_ranks(name: str) -> None:
    found = run_case(known()[name], 2)
    assert (found.what, found.why) == ("passed", "")


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_gradients_on_two_ranks_are_those_on_one_and_those_of_values(name: str) -> None:
    found, judge = run_gradients(known()[name])
    assert (found.what, found.why, judge) == ("passed", "", TRAINED[name])


def test_wrong_gradients_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradients._gradients
    monkeypatch.setattr(
        gradients, "_gradients",
        lambda *args: [{name: 1.001 * x for name, x in each.items()} for each in right(*args)],
    )  # fmt: skip
    found, _ = run_gradients(known()["add_bcast"])
    assert found.what == "wrong"
    assert "along a direction" in found.why


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_is_refused_by_name(name: str) -> None:
    found = run_case(known()[name], 1)
    assert found.what == "refused"
    assert REFUSED[name] in found.why
