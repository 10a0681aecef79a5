"""Models, measurements and their results of record; nothing imports this but tests and benchmarks."""
