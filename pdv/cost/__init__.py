"""What a plan costs: seconds of compute and communication, bytes of memory, all per device."""
