"""Engines by name, each with the words of its own configuration."""
