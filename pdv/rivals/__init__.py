"""What else might have been: experts' plans for the same model and cluster, and the plan where one thing is another."""
