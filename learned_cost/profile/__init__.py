"""Measures kernels, fused subgraphs and collectives on the machine at hand; docs/profiles.md says what rows mean."""
