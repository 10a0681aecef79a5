"""What is asked of a text that was edited, besides what is asked of every text: see ``check``."""
