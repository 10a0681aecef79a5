"""The facts of `report.html` beside plan.json: what is drawn of a step, and of the parallel graph."""
