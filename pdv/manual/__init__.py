"""A planner for configurations written by hand (`tp=8,pp=4,…`), which a simulation runs."""
