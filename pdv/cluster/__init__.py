"""Describing the cluster: its devices, its links, and the meshes they allow. Entry point: `load_cluster`."""

from __future__ import annotations

from pdv.cluster.description import (
    Cluster,
    Device,
    DeviceClass,
    Hop,
    Level,
    Library,
    Link,
    NodeGroup,
    Route,
    Tier,
    Wire,
)
from pdv.cluster.loader import load_cluster
from pdv.cluster.meshes import MeshCandidate, candidate_meshes
from pdv.cluster.routing.route import find_route

__all__ = [
    "Cluster", "Device", "DeviceClass", "Hop", "Level", "Library", "Link", "MeshCandidate", "NodeGroup", "Route",
    "Tier", "Wire", "candidate_meshes", "find_route", "load_cluster",
]  # fmt: skip
