"""The devices that plan.json names. Beside the rest of it, as prices need them and nothing of a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdv.cluster import Device
from pdv.plan.seal import damage_error


def read_devices(document: Mapping[str, Any]) -> tuple[Device, ...]:
    """The device classes of a document's cluster.

    Raises:
        VerificationError: if it misses them.
    """
    try:
        return tuple(Device(**entry["device"]) for entry in document["cluster"]["classes"])
    except (LookupError, TypeError, ValueError, AssertionError) as error:
        raise damage_error(error) from error
