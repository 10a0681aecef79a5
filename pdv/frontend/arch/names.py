"""What transformers calls the parameters of each kind of model, so that a described one reads like an exported one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Prefixes and full names; an empty one is a part that the kind does not have.

    Attributes:
        layer: of all layers; a number follows.
        tokens, positions, kinds: the embeddings' weights.
        embedded: the norm behind them.
        last: the norm before the head.
        transform: the product before the head.
        head: the head's weight.
        rms: whether norms are rms norms.
    """

    layer: str
    tokens: str
    positions: str
    last: str
    head: str
    kinds: str = ""
    embedded: str = ""
    transform: str = ""
    rms: bool = False


_LLAMA = Names("model.layers", "model.embed_tokens.weight", "", "model.norm", "lm_head.weight", rms=True)
NAMES: Mapping[str, Names] = {
    "gpt": Names(
        "transformer.h", "transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f", "lm_head.weight"
    ),
    "bert": Names(
        "bert.encoder.layer",
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder.weight",
        kinds="bert.embeddings.token_type_embeddings.weight",
        embedded="bert.embeddings.LayerNorm",
        transform="cls.predictions.transform.dense",
    ),
    "llama": _LLAMA,
    "mixtral": _LLAMA,
}
