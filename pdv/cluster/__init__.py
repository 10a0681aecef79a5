"""Describing the cluster: its devices, its links, and the meshes they allow. Entry point: `load_cluster`."""

from __future__ import annotations

from pdv.cluster.description import Cluster, Device, DeviceClass, Level, Link
from pdv.cluster.loader import load_cluster
from pdv.cluster.meshes import MeshCandidate, candidate_meshes

__all__ = ["Cluster", "Device", "DeviceClass", "Level", "Link", "MeshCandidate", "candidate_meshes", "load_cluster"]
