"""What the emitted text follows from: runs of equal blocks, names, leaves, constants, open sizes."""
