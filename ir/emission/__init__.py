"""How operators say what they are in PyTorch: expressions, and what their text may depend on."""
