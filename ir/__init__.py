"""What a program means: operators, graphs, shardings and their exact evaluation, without torch."""
