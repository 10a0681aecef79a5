"""The model of kernels: features, the network, and its answers with and without torch."""
