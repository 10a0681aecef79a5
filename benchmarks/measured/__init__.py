"""What is measured on real processes: parity, times, memory, and many plans of one model."""
