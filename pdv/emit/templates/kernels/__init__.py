"""Functions that stand for operators of torch, or for what it lacks; copied beside models that use them."""
