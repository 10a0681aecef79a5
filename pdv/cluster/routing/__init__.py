"""Which links the devices of a group load when they exchange data."""
