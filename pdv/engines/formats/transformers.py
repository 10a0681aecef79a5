"""transformers' own distributed models: a `DistributedConfig` as JSON, its `tp_plan` by module among it.

Source: transformers 5.23, ``distributed/configuration_utils.py`` and ``distributed/tensor_parallel.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ir.errors import UsageError
from pdv.engines.beside import beside, read_settings
from pdv.engines.engine import (
    Change,
    Engine,
    Found,
    Reading,
    Settings,
    Target,
    check_names,
    names,
    take_bool,
    take_dtype,
    take_int,
)
from pdv.engines.parsing import parse_json_object
from pdv.manual.configuration import Configuration

KNOWN = names(
    "tp_size tp_plan enable_sequence_parallel enable_expert_parallel fsdp_size dp_replicate_size fsdp_plan"
    " fsdp_cpu_offload fsdp_mixed_precision pp_size ep_size ep_plan ep_implementation dtype in_script"
)
STYLES = names(
    "colwise rowwise colwise_gather_output colwise_rep rowwise_rep rowwise_split_input packed_colwise packed_rowwise"
    " embedding_rowwise embedding_colwise sequence_parallel replicated_with_grad_allreduce mla_kv_a_proj all_reduce"
    " moe_tp_experts moe_identity_expert local_params replicate"
)


class Transformers(Engine):
    """Tensor parallelism by module, FSDP2, hybrid sharding."""

    name = "hf-tp-plan"
    file = "tp_plan.json"
    start = "torchrun train.py, with from_pretrained(…, distributed_config=DistributedConfig.from_dict(json.load(…)))"

    def limits(self, given: Configuration, target: Target) -> Iterator[Change]:
        """No stages in training, no sequence or context parallelism, ZeRO-3 alone."""
        if given.pp > 1:
            yield Change({"pp": 1, "vp": 1, "schedule": "1f1b", "partition": None}, "its stages are for inference")
        if given.cp > 1:
            yield Change({"cp": 1}, "DistributedConfig has no context parallelism")
        if given.ep > 1:
            yield Change({"ep": 1}, "its experts are spread over tensor-parallel ranks, too")
        if given.sp:
            yield Change({"sp": False}, "enable_sequence_parallel is reserved, and does nothing yet")
        if given.tp > 1 and not target.styles:
            yield Change({"tp": 1}, "no module of this model has a style that says its cut")
        if given.zero in (1, 2):
            yield Change({"zero": 3}, "its FSDP2 cuts weights")
        if given.recompute not in ("none", "full"):
            yield Change({"recompute": "full"}, "gradient checkpointing is of whole layers")
        if target.dtype != "float32" and given.precision not in ("mixed", "as-emitted"):
            yield Change({"precision": "mixed"}, "parameters are float32, or of compute's type")
        if target.dtype == "float16" and given.precision == "mixed":
            yield Change({"precision": "as-emitted"}, "fsdp_mixed_precision is of bfloat16")
        if given.precision == "mixed" and given.data == 1 < given.tp:
            yield Change({"precision": "as-emitted"}, "fsdp_mixed_precision is of FSDP2")

    def in_script(self, given: Configuration) -> Mapping[str, str]:
        """All of the loop."""
        said = {
            "micro_batch": f"batches of {given.micro_batch} rows",
            "batch": f"optimizer.step() after {given.micro_batches} of them",
        }
        if given.recompute == "full":
            said["recompute"] = "model.gradient_checkpointing_enable()"
        return said

    def write(self, given: Configuration, target: Target) -> str:
        """Fields of a `DistributedConfig`, and what the script says beside (`from_dict` reads over it)."""
        shard = (given.shard or given.data) if given.zero else 1
        said: dict[str, Any] = {"tp_size": given.tp, "fsdp_size": shard, "dp_replicate_size": given.data // shard}
        said["fsdp_mixed_precision"] = given.precision == "mixed"
        if given.tp > 1:
            said["tp_plan"] = dict(target.styles)
        said |= {"dtype": target.dtype, "in_script": beside(given, self.in_script(given))}
        return json.dumps(said, indent=2) + "\n"

    def read(self, text: str, reading: Reading) -> Found:
        """The same back."""
        said = {name: value for name, value in parse_json_object(text, self.name).items() if value is not None}
        check_names(said, KNOWN, "a DistributedConfig")
        _check_styles(said.get("tp_plan", {}))
        settings: Settings = {}
        for name, field in (("tp_size", "tp"), ("pp_size", "pp"), ("ep_size", "ep")):
            if name in said:
                settings[field] = take_int(said[name], name)
        if "tp_size" not in said and said.get("tp_plan"):
            rest = reading.devices // (_size(said, "fsdp_size") * _size(said, "dp_replicate_size"))
            settings["tp"] = max(rest // settings.get("pp", 1), 1)
        shard, copies = _size(said, "fsdp_size"), _size(said, "dp_replicate_size")
        settings |= {"dp": shard * copies, "zero": 3 if shard > 1 else 0}
        settings |= {"shard": shard} if shard > 1 and copies > 1 else {}
        mixed = take_bool(said.get("fsdp_mixed_precision", False), "fsdp_mixed_precision")
        settings["precision"] = "mixed" if mixed else "as-emitted"
        unpriced = ("fsdp_cpu_offload",) if said.get("fsdp_cpu_offload") else ()
        dtype = "bfloat16" if mixed else take_dtype(said.get("dtype"))
        settings |= read_settings(str(said["in_script"])) if said.get("in_script") else {}
        return Found(settings, dtype, unpriced, tuple(name for name in said if name in ("fsdp_plan", "ep_plan")))


def _size(said: Mapping[str, Any], name: str) -> int:
    return take_int(said.get(name, 1), name)


def _check_styles(plan: object) -> None:
    """Every module has a style that there is.

    Raises:
        UsageError: naming the first that has none.
    """
    if plan == "auto":
        return
    if not isinstance(plan, dict):
        raise UsageError("tp_plan is neither a table of modules and styles nor auto")
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UsageError(f"tp_plan: {pattern!r} has the style {style!r}", f"Allowed: {', '.join(sorted(STYLES))}")
