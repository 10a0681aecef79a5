"""Names that the emitted program needs for itself."""

from __future__ import annotations

_MODULE = """
    T_destination add_module apply batch_axes bfloat16 buffers call_super_init children compile compute cpu cuda double
    dump_patches eval extra_repr float forward full_gradients full_state_dict get_buffer get_extra_state get_parameter
    get_submodule half ipu load_state_dict mesh modules mtia named_buffers named_children named_modules
    named_parameters parameters register_buffer register_module register_parameter requires_grad_ set_extra_state
    set_submodule share_memory state_dict to to_empty train train_step training type xpu zero_grad
"""
MODULE = frozenset(_MODULE.split())
"""Attributes that nn.Module and the class above the model call their own."""

_GLOBALS = """
    F Mesh Model ParallelModule Path Tensor Weights all_gather all_to_all batch_norm block build causal_attention
    channel_mean channel_variance combine dtype embedding_block i join local make_mesh mesh names nn overwrite partition
    batch_norm_of_all fused_batch_norm per_channel top_k prefix range reduce reduce_scatter regathering replicate self
    super torch tuple weights
"""
GLOBALS = frozenset(_GLOBALS.split())
"""Names that a local variable would hide."""
