"""From measurements to weight files with their model cards."""
