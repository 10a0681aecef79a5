"""Evaluating graphs in NumPy, on one device or on simulated ranks, over floats or over the integers mod a prime."""
