"""Pages of ours in a real browser."""
