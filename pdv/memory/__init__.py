"""What a step holds in memory, when, and who holds it."""
