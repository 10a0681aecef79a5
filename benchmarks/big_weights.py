"""A checkpoint larger than memory: planned, written as a package that reads it in place, and loaded rank by rank.

    python benchmarks/big_weights.py [--smoke] [--folder FOLDER] [--ranks 0,7] [--json OUT]

Llama-3-8B in bfloat16 (16 GB in shards of at most 4 GB, of repeated random numbers, laid out as Hugging Face does), for
eight devices in tensor parallel. Each phase is a process of its own; what is printed is its peak memory, mapped files
included. Loading reads what one rank of eight holds, and compares parts of it with the shards.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Record, arguments

LIMIT_BYTES = 4 << 30
DEVICES = 8
CLUSTER = {"name": "8 H100", "nodes": [{"count": 1, "devices": DEVICES, "device": "h100-80gb-sxm", "link": "nvlink4"}]}
PINS = {"mesh": {"tp": DEVICES}, "techniques": {"tp": "tensor"}}
FULL = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


def main() -> None:
    """Run the phases, each in a process of its own; print their peaks."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the checkpoint and the package go (default: a scratch one)")
    parser.add_argument("--ranks", default="0,7", help="of which loading is measured")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pdv-big-weights-"))
    try:
        record = _measure(options, folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    record.print_summary()
    record.write(options.json)


def _measure(options: argparse.Namespace, folder: Path) -> Record:
    record, config = Record(), SMALL if options.smoke else FULL
    folder.mkdir(parents=True, exist_ok=True)
    most = 1 << 18 if options.smoke else 4 * 10**9
    size = make_checkpoint(folder, config, most)
    print(f"{size / 1e9:.3g} GB in {len(list(folder.glob('model-*')))} files", flush=True)
    phases: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [("plan and write", write_package, (config,))]
    phases += [(f"load rank {rank} of {DEVICES}", load_rank, (int(rank),)) for rank in options.ranks.split(",")]
    for name, phase, args in phases:
        row = {"phase": name, **run_alone(phase, folder, *args)}
        record.rows.append(row)
        print(f"{name}: {row['peak_bytes'] / 2**30:.2f} GiB, {row['cpu_seconds']} CPU-s", flush=True)
    peak = max(row["peak_bytes"] for row in record.rows)
    record.claim("size of the checkpoint", size / 1e9, "GB")
    record.claim("largest peak of memory", peak / 2**30, "GiB", "of a phase, mapped files included")
    package = sum(path.stat().st_size for path in (folder / "llama_pdv").iterdir() if path.is_file())
    record.claim("size of the package", package / 2**20, "MiB", "its weights are the checkpoint's")
    if peak > LIMIT_BYTES:
        raise SystemExit(f"a phase takes {peak / 2**30:.2f} GiB, more than {LIMIT_BYTES >> 30}")
    return record


def run_alone(phase: Callable[..., None], *args: Any) -> dict[str, Any]:
    """Seconds, CPU-seconds and peak memory of a call in a fresh process.

    Raises:
        RuntimeError: if it fails.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, phase, args))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{phase.__name__} failed") from None
    process.join()
    return found


def _report(sender: Any, phase: Callable[..., None], args: tuple[Any, ...]) -> None:
    start = time.monotonic()
    phase(*args)
    used = resource.getrusage(resource.RUSAGE_SELF)
    sender.send(
        {
            "seconds": round(time.monotonic() - start, 1),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "peak_bytes": used.ru_maxrss * 1024,
        }
    )


# ---- Phases ----


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a Llama's parameters, by the names that transformers has for them."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = width // config["num_attention_heads"] * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found |= {f"{layer}.self_attn.{x}_proj.weight": (width, width) for x in ("q", "o")}
        found |= {f"{layer}.self_attn.{x}_proj.weight": (heads, width) for x in ("k", "v")}
        found |= {f"{layer}.mlp.{x}_proj.weight": (inner, width) for x in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        found |= {f"{layer}.{x}_layernorm.weight": (width,) for x in ("input", "post_attention")}
    return found | {"model.norm.weight": (width,), "lm_head.weight": (config["vocab_size"], width)}


def make_checkpoint(folder: Path, config: dict[str, Any], most: int) -> int:
    """Shards of at most so many bytes, and their index; how many bytes of tensors there are."""
    import ml_dtypes

    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in _shapes(config).items():
        if shards[-1] and sum(2 * math.prod(x) for x in (*shards[-1].values(), shape)) > most:
            shards.append({})
        shards[-1][name] = shape
    numbers = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16)
    block = memoryview(np.resize(numbers, 5 << 20).view(np.uint8)).cast("B")
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, shape in shard.items():
            end = start + 2 * math.prod(shape)
            header[name], start = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}, end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for at in range(0, start, len(block)):
                out.write(block[: min(len(block), start - at)])
        weight_map |= dict.fromkeys(shard, file)
        total += start
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


def write_package(folder: Path, config: dict[str, Any]) -> None:
    """Plan the model, whose own weights are never touched, and write a package that reads the checkpoint in place."""
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

    import pdv

    made = LlamaConfig.from_dict({**config, "bos_token_id": None, "eos_token_id": None})
    with torch.device("meta"):
        module: Any = LlamaForCausalLM(made)
    module = module.to(torch.bfloat16).to_empty(device="cpu")  # memory that nothing is written to takes no room
    module.model.rotary_emb = LlamaRotaryEmbedding(made)
    ids = torch.zeros(8, 64, dtype=torch.int64)
    plan = pdv.optimize(
        module, {"input_ids": ids}, cluster=CLUSTER, pins=PINS, weights=folder / INDEX, check=False, rules="none"
    )
    plan.save(folder / "llama_pdv", overwrite=True, link_weights=True)


def load_rank(folder: Path, rank: int) -> None:
    """What ``build`` makes on one of the ranks, without the others; parts of it are compared with the shards.

    Raises:
        AssertionError: if something else was loaded.
    """
    import importlib
    import sys

    import torch

    sys.path.insert(0, str(folder))
    package: Any = importlib.import_module("llama_pdv.model")
    parallel: Any = importlib.import_module("llama_pdv.parallel")
    runtime: Any = importlib.import_module("llama_pdv.runtime")
    mesh = runtime.Mesh((parallel.Axis("tp", DEVICES, rank),), torch.device("cpu"))
    model = package.Model(mesh, runtime.Weights(folder / "llama_pdv" / "weights.safetensors"))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    total = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    assert held < 0.3 * total, f"one rank of {DEVICES} holds {held} bytes of {total}"
    compared = 0
    for tensor, stored in mesh.origins[:: max(len(mesh.origins) // 8, 1)]:
        (name,) = stored.names()
        compared += _compare(folder, name, tensor.detach(), rank)
    assert compared, "nothing is cut"


def _compare(folder: Path, name: str, piece: Any, rank: int) -> int:
    """How many dims of a tensor are cut; its values are those of the shard."""
    from safetensors import safe_open

    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    with safe_open(folder / file, framework="pt") as opened:
        part = opened.get_slice(name)
        shape = part.get_shape()
        cut = [dim for dim, size in enumerate(shape) if piece.shape[dim] != size]
        ranges = [slice(None)] * len(shape)
        for dim in cut:
            ranges[dim] = slice(rank * piece.shape[dim], (rank + 1) * piece.shape[dim])
        assert bool((part[tuple(ranges)] == piece).all()), name
    return len(cut)


if __name__ == "__main__":
    main()
