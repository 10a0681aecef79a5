"""Proofs that a parallel program computes what its source does, outputs and gradients. Entry point: `verify_equal`."""
