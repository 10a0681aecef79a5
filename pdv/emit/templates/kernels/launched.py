"""Which processes there are, and which GPU is this one's: of a process group that is there, or of the environment.

Entry points: ``world_size``, ``check_world``, ``own_gpu``, ``join``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Of the process group that there is, else of the one that torchrun, or another launcher, says by the environment.

    Raises:
        RuntimeError: if the environment says only part of one.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    said = {name: os.environ[name] for name in _LAUNCHED if os.environ.get(name)}
    missing = [name for name in _LAUNCHED if name not in said]
    if missing and (int(said.get("WORLD_SIZE", "1")) > 1 or int(said.get("RANK", "0")) > 0):
        there = ", ".join(f"{name}={value}" for name, value in said.items())
        raise RuntimeError(
            f"half-launched: {there} in the environment, and no {', '.join(missing)}. Allowed: all of "
            f"{', '.join(_LAUNCHED)}, as torchrun sets them, or a process group that is there. Start it with torchrun; "
            "set what is missing (of Slurm: RANK=$SLURM_PROCID); or call torch.distributed.init_process_group before "
            "build()."
        )
    return int(said.get("WORLD_SIZE", "1"))


def check_world(world: int, sizes: Mapping[str, int], stages: int) -> None:
    """Whether so many processes are a mesh, or one in each of so many stages.

    Raises:
        RuntimeError: if they are neither.
    """
    inside = math.prod(sizes.values())
    if world not in (wanted := stages * inside, inside):
        shape = " x ".join(f"{name}={size}" for name, size in sizes.items())
        shape = f"{stages} stages" + (f" of {shape}" if shape else "") if stages > 1 else f"the mesh {shape}"
        raise RuntimeError(
            f"wrong-world-size: {world} processes for {shape}. It runs on {wanted}, or unsharded on 1. "
            f"Start it with torchrun and {wanted} processes in all, e.g. --nproc-per-node={wanted} on one machine."
        )


def own_gpu(kind: torch.device) -> torch.device:
    """The GPU of this process: of its launcher, as it is given, or by its rank, as processes are on hosts in order."""
    if said := os.environ.get("LOCAL_RANK"):
        return torch.device("cuda", int(said))
    if ":" in str(kind):
        return kind
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    return torch.device("cuda", rank % torch.cuda.device_count())


def join(backend: str) -> None:
    """Make the process group that the environment says."""
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # from NCCL 2.26 on
    starts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if not (starts and kept and os.environ.get("GROUP_WORLD_SIZE") == "1"):  # several agents count differently
        dist.init_process_group(backend)
        return
    # torchrun keeps one store from start to start, in which processes would find the addresses of those that ended.
    where, rank, size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kept_store = dist.TCPStore(where, int(os.environ["MASTER_PORT"]), size, is_master=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"start_{starts}", kept_store)  # type: ignore[attr-defined]  # both are documented
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
