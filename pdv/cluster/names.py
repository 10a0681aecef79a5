"""What people, vendors and clouds call devices and nodes, and the preset that each name means.

The one home of such names: cluster files and published runs are read by it. Entry points: `preset_of` for a name in a
cluster file, which has to be exact up to its spelling, and `device_in` for free text such as ``H100-96G(HBM2e,500W)``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache

from pdv.cluster.presets import DEVICES, record_labels, split_part

# Other names of nodes: of vendors (a DGX is an HGX board in a case), and what clouds call a machine in full.
NODE_ALIASES: Mapping[str, str] = {
    "dgx-gb200": "gb200-nvl72", "dgx-gb300": "gb300-nvl72", "hgx-h100": "dgx-h100", "dgx-h200": "hgx-h200",
    "hgx-a100": "dgx-a100", "hgx-b200": "dgx-b200", "hgx-b300": "dgx-b300", "nvl72": "gb200-nvl72",
    "Standard_ND96asr_v4": "nd-a100-v4", "Standard_ND96amsr_A100_v4": "ndm-a100-v4",
    "Standard_ND96isr_H100_v5": "nd-h100-v5", "Standard_ND96isr_H200_v5": "nd-h200-v5",
    "p5e.48xlarge": "p5en.48xlarge",
}  # fmt: skip
# A word in free text -> the preset of a device; what stands first is taken, so longer words do.
DEVICE_WORDS: tuple[tuple[str, str], ...] = (
    ("gb300", "gb300"), ("gb200", "gb200"), ("gh200", "gh200-96gb"), ("gh96", "gh200-96gb"),
    ("b300", "b300-sxm-270gb"), ("b200", "b200-sxm-180gb"), ("h200", "h200-141gb-sxm"), ("h800", "h800-sxm-80gb"),
    ("h100nvl", "h100-94gb-nvl"), ("h10096", "h100-96gb-sxm"), ("h10094", "h100-94gb-sxm"), ("h100", "h100-80gb-sxm"),
    ("h20", "h20-sxm-96gb"), ("a10080gpcie", "a100-80gb-pcie"), ("a100pcie", "a100-40gb-pcie"),
    ("a10040", "a100-40gb-sxm"), ("a100", "a100-80gb-sxm"), ("a800", "a100-80gb-sxm"), ("v10032", "v100-32gb-sxm"),
    ("v100", "v100-16gb-sxm"), ("mi300", "mi300x"), ("mi250", "mi250-1gcd"), ("rtx4090", "rtx-4090"),
    ("rtx3090", "rtx-3090"), ("a6000", "rtx-a6000"), ("l40s", "l40s"), ("l40", "l40"), ("a40", "a40"),
    ("a10", "a10g"), ("l4", "l4"), ("p100", "p100-pcie-16gb"), ("t4", "t4"),
)  # fmt: skip
SIZE = re.compile(r"(\d+)\s*gi?b?\b", re.ASCII)  # of memory: 80GB, 80 GiB, 80g
LETTERS_AND_NUMBER = re.compile(r"([a-z])(?=[0-9])", re.ASCII)
POWER = re.compile(r"(\d{2,4})\s*W\b", re.ASCII)
MAKERS = ("nvidia", "amd", "tesla", "gpu")


def preset_of(name: str, presets: Collection[str]) -> str | None:
    """The preset that a name means: itself, or one that differs from it in spelling, or of which it is an alias."""
    found = name if name in presets else _names().get(_plain(name))
    return found if found in presets else None


def device_in(text: str) -> str | dict[str, str] | None:
    """The device that free text names, as a cluster file says it, with its power limit and MIG part."""
    watts, part = POWER.search(text), split_part(text)
    whole = part[0] if part else text
    bare = re.sub(r"[^a-z0-9]", "", SIZE.sub(r"\1g", re.sub(r"\(.*?\)", "", whole.lower())))
    found = preset_of(whole, DEVICES) or next((preset for word, preset in DEVICE_WORDS if word in bare), None)
    limits = ({"power": f"{watts[1]} W"} if watts else {}) | ({"mig": part[1]} if part else {})
    return {"preset": found} | limits if found and limits else found


@cache
def _names() -> Mapping[str, str]:
    """Plain name -> preset: of devices also what their records are called."""
    found = {_plain(alias): preset for alias, preset in NODE_ALIASES.items()}
    for labels in record_labels():
        preset = next((label for label in labels if label in DEVICES), None)
        preset = preset or next((label.lower() for label in labels if label.lower() in DEVICES), None)
        found |= {_plain(label): preset for label in labels if preset is not None}
    return found


def _plain(name: str) -> str:
    """A name without its maker, case, order of words and ways to write a size: ``H100-SXM5-80GB``, ``80g h100 sxm``;
    ``RTX4090`` is ``rtx 4090``.
    """
    split = LETTERS_AND_NUMBER.sub(r"\1 ", re.sub(r"\bsxm\d\b", "sxm", SIZE.sub(r"\1g", name.lower())))
    words = re.split(r"[^a-z0-9.]+", split)
    return " ".join(sorted(word for word in words if word and word not in MAKERS))
