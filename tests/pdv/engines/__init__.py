"""The engines' own packages read what is exported for them."""
