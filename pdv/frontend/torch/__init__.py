"""`torch.export` programs and plain modules."""
