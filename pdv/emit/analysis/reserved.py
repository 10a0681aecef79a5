"""Names that the emitted program needs for itself."""

from __future__ import annotations

import re
from pathlib import Path

from ir.ops.parallel import OPS

_MODULE = """
    add_module apply batch_axes bfloat16 buffers call_super_init calls check_every check_in_sync check_sizes
    children clip_grad_norm_ compile compute cpu cuda data_rank data_world double dump_patches eval extra_repr float
    flush forward full_gradients full_state_dict get_buffer get_extra_state get_parameter get_submodule half ipu
    load_full_state_dict load_safetensors load_state_dict mesh micro_batches modules mtia named_buffers
    named_children named_modules named_parameters no_sync own_loss own_parameters parameters parameters_in_graph
    parameters_of
    register_buffer register_module register_parameter requires_grad_ run_batches run_given save_safetensors
    self_check set_extra_state set_submodule shard_batch share_memory state_dict sum_over_data summed T_destination
    takes to to_empty train train_step training type whole whole_parts xpu zero_grad
"""
MODULE = frozenset(_MODULE.split())
"""Attributes that nn.Module and the class above the model call their own."""

_OPERATORS = Path(__file__).parent.with_name("templates") / "kernels" / "operators.py"
HELPERS = tuple(re.findall(r"^def (\w+)", _OPERATORS.read_text(encoding="utf-8"), re.MULTILINE))
"""Functions of ``operators.py`` that expressions may call."""
PARALLEL = tuple(op.name for op in OPS if op.emit)
"""Functions of ``parallel.py``: one for each parallel operator that is written."""
GATHERS = ("gather", "gather_together", "regathering")
"""Functions of ``gathers.py``."""
FLOAT8 = ("float8_linear", "float8_linear_by_rows")
"""Functions of ``float8.py``: products in narrow formats."""
HOSTED = ("on_host",)
"""Of ``rounding.py``: what backward needs waits in the host's memory."""
REMEMBERED = ("again",)
"""Of ``remembered.py``: what backward reads is computed again."""
RUNTIME = ("Mesh", "ParallelModule", "Weights", "join", "local", "make_mesh")
"""What ``runtime.py`` gives."""
PIPELINE = ("PipelinedModule", "Stage")
"""What ``pipeline.py`` gives."""
SLICES = ("SlicedModule", "at_end", "earlier", "now")
"""What ``slices.py`` gives: the model, and moves along time."""
MODULES = {
    "float8": FLOAT8,
    "gathers": GATHERS,
    "operators": HELPERS,
    "parallel": PARALLEL,
    "pipeline": PIPELINE,
    "remembered": REMEMBERED,
    "rounding": HOSTED,
    "runtime": RUNTIME,
    "slices": SLICES,
}
"""The modules beside ``model.py``, by what it may take of each."""

_OTHERS = """
    F Model Path Tensor block build checkpoint dtype i mesh names nn prefix range self super torch tuple weights
"""
GLOBALS = frozenset((*_OTHERS.split(), *(name for names in MODULES.values() for name in names)))
"""Names that a local variable would hide."""

CALLING = frozenset(("self", "checkpoint", "regathering", *HOSTED))
"""Names by which a forward that does nothing else calls what it does."""
