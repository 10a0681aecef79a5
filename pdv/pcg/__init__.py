"""The parallel computation graph: how an assignment becomes one, how values move in it, and what it costs."""
