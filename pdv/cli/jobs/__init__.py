"""`pdv plan`: many models and clusters in one go."""
