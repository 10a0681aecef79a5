"""Which preset of `pdv.cluster` describes the device at hand."""

from __future__ import annotations

import re

import torch

from pdv.cluster import Cluster, Device, load_cluster
from pdv.cluster.presets import DEVICES

# What drivers call the products that presets describe.
PRESET_OF = {
    "Tesla V100-SXM2-16GB": "v100-16gb-sxm",
    "Tesla V100-SXM2-32GB": "v100-32gb-sxm",
    "Tesla V100-PCIE-32GB": "v100-32gb-pcie",
    "Tesla T4": "t4",
    "NVIDIA A100-SXM4-40GB": "a100-40gb-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-80gb-sxm",
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA H100 80GB HBM3": "h100-80gb-sxm",
    "NVIDIA H200": "h200-141gb-sxm",
    "AMD Instinct MI300X": "mi300x",
}


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
    name = PRESET_OF.get(torch.cuda.get_device_name(device))
    return None if name is None else DEVICES[name]


def label(device: torch.device) -> str:
    """A short name for files and tables: the preset's, else the driver's."""
    known = preset(device)
    return known.name if known else re.sub(r"\W+", "-", torch.cuda.get_device_name(device)).strip("-").lower()


def one_device(device: torch.device) -> Cluster:
    """A cluster of this device alone; a GPU without preset is planned for as an A100, which a mesh of one allows."""
    known = preset(device) or DEVICES["a100-80gb-sxm"]
    return load_cluster({"name": known.name, "nodes": [{"devices": 1, "device": known.name}]})
