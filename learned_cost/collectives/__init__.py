"""The model of collectives: α–β physics and a learned correction."""
