"""What happens around a module while it is traced."""
