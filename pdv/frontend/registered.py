"""What users said of operators that nobody declared: how they may be cut, and what an ONNX one is in torch.

Written by ``pdv.register_operator``; read by both frontends, of which one knows no torch.
"""

from __future__ import annotations

LOOPS: dict[str, str] = {}
"""Operator of torch -> the loops along which it may be cut."""

IN_TORCH: dict[str, str] = {}
"""Operator of an ONNX file, ``domain::Name`` -> that of torch."""
