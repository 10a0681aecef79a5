"""What stands for functions of torch, or mends what these lack; copied beside models."""
