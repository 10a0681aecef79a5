"""Devices as records: their published or measured numbers, one YAML file each."""
