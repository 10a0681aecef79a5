"""Measurements: what was measured, in tables, read from folders and checked."""
