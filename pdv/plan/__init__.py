"""A plan as data: its derivation, certificate, proof and document, saved and read back."""
