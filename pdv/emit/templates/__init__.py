"""Files that are copied into every emitted package as they stand; they import torch alone."""
