"""Tools of the documentation: its site, what is generated of the code, and the tutorial run from a wheel."""
