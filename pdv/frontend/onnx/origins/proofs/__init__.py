"""What torch's exporter computed of parameters, known by the weights that the module had when it was exported."""
