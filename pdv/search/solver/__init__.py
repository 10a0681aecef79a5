"""One block as a sum of small tables, minimized exactly or bounded from below."""
