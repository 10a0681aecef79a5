"""What training loops do with emitted packages: checkpoints that all plans read, resharding, running averages.

An emitted package needs none of this.
"""
