"""Training steps of hand-written parallel programs and of emitted ones, on clusters with real, shaped links."""
