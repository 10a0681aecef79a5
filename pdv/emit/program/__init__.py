"""The text of model.py. Entry point: `model_text.write_program`."""
