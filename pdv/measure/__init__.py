"""A plan against measurements: which kernels decide it, and its own steps run beside what was predicted."""
