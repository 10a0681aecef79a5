"""From a parallel computation graph to a package that trains: readable PyTorch, and nothing of ours in it."""
