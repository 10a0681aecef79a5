"""What is measured: kernels and groups of kernels, as programs that a device runs."""
