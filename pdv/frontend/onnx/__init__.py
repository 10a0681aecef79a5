"""ONNX models, read and written."""
