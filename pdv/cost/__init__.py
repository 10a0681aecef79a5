"""What a device and a link take: seconds of compute and of communication."""
