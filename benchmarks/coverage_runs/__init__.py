"""The parts of ``benchmarks/coverage.py``."""
