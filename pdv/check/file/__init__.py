"""ONNX files, run by other implementations and compared with what was read of them."""
