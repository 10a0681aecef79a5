"""Exported plans in the engines that they are for, on CPU processes."""
