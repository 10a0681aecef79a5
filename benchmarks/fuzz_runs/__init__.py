"""Wrong and hostile files of every kind that pdv reads, each given to a command in a process of its own
(`benchmarks/fuzz.py`).
"""
