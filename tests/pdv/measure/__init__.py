"""pdv.measure."""
