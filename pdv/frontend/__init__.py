"""Sources of programs: ONNX files, `torch.export` programs and plain modules, all to one canonical graph.

Entry point: `load_program`.
"""

from pdv.frontend.load import load_program
from pdv.frontend.program import Program, Weights

__all__ = ["Program", "Weights", "load_program"]
