"""Modules as people write them, given to ``pdv.optimize`` (`benchmarks/strangers.py`)."""
