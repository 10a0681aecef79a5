"""What commands that take long have in common: progress that people see, a log, and what Ctrl-C does."""
