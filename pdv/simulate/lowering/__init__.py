"""From a PCG to the tasks that one step of it runs, with their prices."""
