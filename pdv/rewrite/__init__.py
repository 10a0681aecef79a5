"""Substitutions: what a rule is, the rules, and how a derivation is replayed into a parallel computation graph."""
