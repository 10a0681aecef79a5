"""A model from a short description, `gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200`: shapes without weights.

Decides what a description means; `pdv.frontend.arch.graph` builds the graph. A plan of such a model can be priced,
simulated and compared, but not emitted: there is nothing to put into `weights.safetensors`.
Entry point: `arch`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from ir.errors import ModelError, did_you_mean
from pdv.frontend.arch.presets import ALIASES, PRESETS

Kind = Literal["gpt", "bert", "llama", "mixtral"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST = 10**9
UNITS = {"": 1, "k": 1024}  # `seq=8k`


@dataclass(frozen=True, slots=True)
class Arch:
    """Sizes of a transformer.

    Attributes:
        kind: "gpt" (learned positions, layer norm before, gelu), "bert" (layer norm behind, masked-language head),
            "llama" (rms norm, rotary positions, gated feed-forward, groups of key and value heads) or "mixtral"
            (a llama whose feed-forward is ``experts``, of which each token meets ``topk``).
        layers, hidden, heads, seq, vocab: the usual ones; ``seq`` is the length of a training sample.
        kv_heads: heads of keys and values; fewer than ``heads`` where several queries share one.
        ffn: width of the feed-forward's inside.
        head: width of one head.
        tied: whether the head reads the embedding's weight.
        name: what people call it.
    """

    kind: Kind
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    kv_heads: int
    ffn: int
    head: int
    experts: int = 0
    topk: int = 0
    tied: bool = True
    name: str = ""

    def text(self) -> str:
        """The description in full: ``arch(a.text()) == a`` but for the name."""
        sizes = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        named = ",".join(f"{key}={int(value)}" for key, value in sizes.items() if key in _keys(self.kind))
        return f"{self.kind}:{named}"


def _keys(kind: str) -> tuple[str, ...]:
    """Sizes that a kind has."""
    common = ("layers", "hidden", "heads", "seq", "vocab", "ffn", "head", "tied")
    if kind in ("gpt", "bert"):
        return common
    return (*common, "kv_heads", *(("experts", "topk") if kind == "mixtral" else ()))


def arch(text: str) -> Arch:
    """The sizes that a description names: ``KIND:key=value,...``, or a known model, ``llama-3-8b:seq=4096``.

    Raises:
        ModelError: if it cannot be read, or its sizes do not go together.
    """
    head, _, rest = text.strip().partition(":")
    head = head.strip().lower()
    given = _sizes(text, rest)
    head = ALIASES.get(head, head)
    if head in PRESETS:
        kind, known, _ = PRESETS[head]
        return _complete(text, kind, {**known, **given}, head)
    if head not in KINDS:
        names = (*KINDS, *PRESETS, *ALIASES)
        raise ModelError(
            f"--arch {text!r}: {head!r} is no kind of model and no known one",
            f"Kinds: {', '.join(KINDS)}. Known: {', '.join(PRESETS)}",
            did_you_mean(head, names) or "Write for instance gpt:layers=24,hidden=2048,heads=16,seq=2048,vocab=51200",
        )
    return _complete(text, head, given, "")


def _sizes(text: str, rest: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        match = re.fullmatch(r"([a-z_]+)\s*=\s*([0-9][0-9_]{0,12})(k?)", part.lower(), re.ASCII)
        if match is None or match[1] in found:
            why = "is given twice" if match is not None else "is no size"
            raise ModelError(f"--arch {text!r}: {part!r} {why}", "Allowed: key=number, each key once", "")
        found[match[1]] = int(match[2]) * UNITS[match[3]]
    return found


def _complete(text: str, kind: str, given: dict[str, int], name: str) -> Arch:
    """The record, what is left out as the kind has it by default."""
    unknown = [key for key in given if key not in _keys(kind)]
    if unknown:
        known = _keys(kind)
        mend = did_you_mean(unknown[0], known) or "Leave it out"
        raise ModelError(f"--arch {text!r}: {kind} has no {unknown[0]!r}", f"Sizes: {', '.join(known)}", mend)
    needed = ("layers", "hidden", "heads", "seq", "vocab", *(("experts", "topk") if kind == "mixtral" else ()))
    missing = [key for key in needed if key not in given]
    if missing:
        raise ModelError(f"--arch {text!r} lacks {', '.join(missing)}", "", f"Add {missing[0]}=…")
    for key, value in given.items():
        if not (0 if key == "tied" else 1) <= value <= MOST:
            raise ModelError(f"--arch {text!r}: {key} is {value}", "Allowed: 1 and more", "")
    hidden, heads = given["hidden"], given["heads"]
    if "head" not in given and hidden % heads:
        raise ModelError(
            f"--arch {text!r}: hidden {hidden} does not divide into {heads} heads",
            mend="Choose heads that divide it, or give the width of a head, head=128",
        )
    made = Arch(
        next(entry for entry in KINDS if entry == kind),
        given["layers"],
        hidden,
        heads,
        given["seq"],
        given["vocab"],
        given.get("kv_heads", heads),
        given.get("ffn", _ffn(kind, hidden)),
        given.get("head", hidden // heads),
        given.get("experts", 0),
        given.get("topk", 0),
        bool(given.get("tied", kind in ("gpt", "bert"))),
        name or kind,
    )
    return _check(text, made)


def _ffn(kind: str, hidden: int) -> int:
    """4 h; of a gated feed-forward two thirds of that, in whole 256s (Touvron et al., 2023, section 2.2)."""
    return 4 * hidden if kind in ("gpt", "bert") else -(-8 * hidden // (3 * 256)) * 256


def _check(text: str, made: Arch) -> Arch:
    if made.heads % made.kv_heads:
        raise ModelError(
            f"--arch {text!r}: {made.heads} heads do not share {made.kv_heads} key and value heads",
            mend="Choose kv_heads that divide heads",
        )
    if made.head % 2 and made.kind in ("llama", "mixtral"):
        raise ModelError(f"--arch {text!r}: rotary positions turn pairs, and a head is {made.head} wide")
    if made.kind == "mixtral" and made.topk > made.experts:
        raise ModelError(f"--arch {text!r}: topk {made.topk} of {made.experts} experts")
    return made


def with_layers(arch: Arch, layers: int) -> Arch:
    """The same model, shallower or deeper."""
    return replace(arch, layers=layers)
