"""Transformers from a short description or by name, without weights."""
