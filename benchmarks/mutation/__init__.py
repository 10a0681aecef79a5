"""Programs made wrong in one place, and what refuses them: see ``benchmarks/mutation_score.py``."""
