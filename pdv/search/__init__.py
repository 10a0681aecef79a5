"""Which substitutions to apply: blocks solved exactly, chained over their boundary states, under a memory limit."""
