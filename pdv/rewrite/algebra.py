"""The algebraic rules that the search uses by default: the laws of the library in both directions, some left out."""

from __future__ import annotations

from pdv.rewrite.library import all_rules

# True laws that match nearly everywhere and were never part of a cheaper plan on the model set, but multiply what has
# to be priced (ResNet-50 on four devices: 6.0 CPU-s with them, 0.9 without). `pdv rules list` has them all the same.
LEFT_OUT = frozenset(
    {
        "associate-add",
        "associate-add~",
        "associate-mul",
        "associate-mul~",
        "fuse-permute-linear-reshape-into-conv2d~",  # every convolution of points as a product
        "move-permute-past-linear~",
        "move-scale-past-channel_mean",  # scales the image instead of its mean
    }
)
RULES = tuple(rule for rule in all_rules() if rule.name not in LEFT_OUT)
