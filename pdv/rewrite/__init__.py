"""Substitutions: what a rule is, the algebraic rules, and the parallel ones that every operator has."""
