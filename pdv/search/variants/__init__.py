"""Algebraic variants of a block, and backtracking search over them."""
