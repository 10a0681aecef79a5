"""How values lie in the memory of a device, and what kernels hold beside them."""
