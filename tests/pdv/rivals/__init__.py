"""What else might have been."""
