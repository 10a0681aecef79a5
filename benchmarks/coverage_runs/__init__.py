"""The parts of ``benchmarks/coverage.py``."""

SLOW = {  # a device on which it pays to cut models that are so small: they stand for larger ones
    "name": "slow",
    "memory": "1 GiB",
    "peak": {"float32": "1 GFLOP/s"},
    "memory_bandwidth": "20 GB/s",
    "launch_latency": "1 us",
    "efficiency": 1.0,
}
