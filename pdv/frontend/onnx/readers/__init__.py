"""What families of ONNX operators become."""
