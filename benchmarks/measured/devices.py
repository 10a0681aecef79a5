"""Which preset of `pdv.cluster` describes the device at hand."""

from __future__ import annotations

import re

import torch

from learned_cost.devices.device import find, load_records
from pdv.cluster import Cluster, Device, load_cluster
from pdv.cluster.presets import DEVICES


def default_device() -> torch.device:
    """The GPU if there is one, else one core of the CPU, as the preset ``cpu-core`` describes it."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    return torch.device("cpu")


def preset(device: torch.device) -> Device | None:
    """What is known of a device, or None of a GPU without preset."""
    if device.type == "cpu":
        return DEVICES["cpu-core"]
    known = find(torch.cuda.get_device_name(device), load_records().values())
    names = () if known is None else (known.name.lower(), *known.aliases)
    return next((DEVICES[name] for name in names if name in DEVICES), None)


def label(device: torch.device) -> str:
    """A short name for files and tables: the preset's, else the driver's."""
    known = preset(device)
    return known.name if known else re.sub(r"\W+", "-", torch.cuda.get_device_name(device)).strip("-").lower()


def one_device(device: torch.device) -> Cluster:
    """A cluster of this device alone; a GPU without preset is planned for as an A100, which a mesh of one allows."""
    known = preset(device) or DEVICES["a100-80gb-sxm"]
    return load_cluster({"name": known.name, "nodes": [{"devices": 1, "device": known.name}]})
