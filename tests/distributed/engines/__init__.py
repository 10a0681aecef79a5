"""Exported plans train in their engines."""
