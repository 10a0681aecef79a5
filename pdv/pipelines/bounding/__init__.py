"""What no plan's step takes less than: bounds of cells of plans, and what they are made of."""
