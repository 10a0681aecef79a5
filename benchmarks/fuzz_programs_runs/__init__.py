"""Random modules under random legal plans, judged against the modules themselves (`benchmarks/fuzz_programs.py`)."""
