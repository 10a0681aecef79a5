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
        # The same arithmetic by more kernels, which move more: it was taken where these were priced too low. Steps of
        # a small ViT on CPUs took 3.5 % more CPU time with it, priced 0.5 % lower.
        "unfold-attention",
    }
)
RULES = tuple(rule for rule in all_rules() if rule.name not in LEFT_OUT)
