"""Mixtral whose experts run dense: every expert on every token, with weight zero where the router did not choose it.

The same function as transformers' loop over experts, whose shapes depend on data and so cannot be planned. It costs
experts / top_k times the arithmetic; in return the experts are a loop of two batched products, and cutting that loop
is expert parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM, MixtralSparseMoeBlock


class DenseMixture(MixtralSparseMoeBlock):
    """The mixture with the weights of transformers' own block: hidden [b, s, d] -> [b, s, d]."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [b, s, d]."""
        x = hidden_states.flatten(0, 1)  # [t, d]
        probabilities = F.softmax(F.linear(x, self.gate.weight).float(), -1)  # [t, e]
        values, chosen = probabilities.topk(self.top_k, -1)
        kept = torch.zeros_like(probabilities).scatter(-1, chosen, values)
        share = (kept / kept.sum(-1, keepdim=True)).to(x.dtype)
        gate, up = (x @ self.experts.gate_up_proj.transpose(1, 2)).chunk(2, -1)  # [e, t, f] each
        weighted = self.experts.act_fn(gate) * up * share.t().unsqueeze(-1)
        y: Tensor = (weighted @ self.experts.down_proj.transpose(1, 2)).sum(0)
        return y.view_as(hidden_states)


class Mixtral(MixtralForCausalLM):  # type: ignore[no-untyped-call]
    """Token ids [b, s] -> logits [b, s, vocab]."""

    def forward(self, input_ids: Tensor) -> Any:
        """input_ids: [b, s]."""
        return super().forward(input_ids, use_cache=False).logits


def mixtral(config: dict[str, Any]) -> Mixtral:
    """The model with dense experts."""
    module = Mixtral(MixtralConfig.from_dict(config | {"attn_implementation": "sdpa"}))
    for layer in module.model.layers:
        layer.mlp.__class__ = DenseMixture  # its weights and sizes stay
    return module
