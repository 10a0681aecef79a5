"""Configurations of engines that people run: the nearest one to a plan, written, and theirs, read."""
