"""How values lie in the memory of a device, what kernels hold beside them, and what backward keeps or makes again."""
