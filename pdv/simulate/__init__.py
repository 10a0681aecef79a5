"""What one step costs: events in time."""
