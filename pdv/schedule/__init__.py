"""Pipelines: how a model is cut into stages, and in which order micro-batches run."""
