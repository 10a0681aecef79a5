"""Published training runs, and the simulator on them."""
