"""Stages, micro-batches, recomputation and the mesh inside a stage, searched together and chosen by simulation."""
