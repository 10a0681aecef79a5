"""What stands around a search: reading the model, problems, budget, cache, and remedies where nothing fits."""
