"""Read an ONNX file that may be broken or hostile, without reading its weights.

The path is resolved first: with a bare file name `onnx_ir` would skip its own checks of external data. External tensors
must lie in the model's folder, as ordinary files, long enough. Entry point: `read_onnx`.
"""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import onnx_ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no stubs
from onnx_ir.passes.common import InlinePass
from onnx_ir.serde import SerdeError

from ir.errors import ModelError, first_line
from pdv.frontend.onnx.proto import check_proto

MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, OverflowError, MemoryError)
"""What libraries and handlers raise on a missing operand, a wrong attribute, a name in no encoding."""


def read_onnx(path: Path) -> onnx_ir.Model:
    """The model, nodes sorted, functions inlined, external data checked but not read.

    Raises:
        ModelError: if there is no such file, or it is not a valid model.
    """
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(f"model file {str(path)!r} {reason}", "An .onnx file", "Check the path")
    resolved = path.resolve()
    try:
        model = _load_quietly(resolved)
    except (DecodeError, SerdeError, *MALFORMED) as error:
        raise ModelError(
            f"{path} is not a readable ONNX model: {first_line(error)}", "", "Export it again; it may be truncated"
        ) from error
    if len(model.graph) == 0 and not model.graph.outputs:
        raise ModelError(f"{path} is not a readable ONNX model: its graph is empty", "", "Export it again")
    for value in model.graph.initializers.values():
        try:
            _check_initializer(value, resolved.parent)
        except MALFORMED as error:
            raise ModelError(f"initializer {value.name!r} is malformed: {first_line(error)}") from error
    try:
        if model.functions:
            model = InlinePass()(model).model
        model.graph.sort()
    except ValueError as error:
        raise ModelError(
            f"{path} has a cycle: {first_line(error)}", "Nodes that depend on each other in order"
        ) from error
    return model


def _load_quietly(path: Path) -> onnx_ir.Model:
    """Load without onnx_ir's log lines on what it thinks invalid: what matters comes back as an error."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        proto = onnx.load(path, load_external_data=False)
        check_proto(proto)
        model = onnx_ir.from_proto(proto)
        onnx_ir.external_data.set_base_dir(model.graph, path.parent)
        return model
    finally:
        logger.setLevel(before)


def _check_initializer(value: onnx_ir.Value, folder: Path) -> None:
    """Raises ModelError if a stored tensor is missing, misplaced, of the wrong length or of an impossible shape."""
    tensor = value.const_value
    if tensor is None:
        raise ModelError(f"initializer {value.name!r} has no value")
    if any(not isinstance(size, int) or size < 0 for size in tensor.shape):
        raise ModelError(f"initializer {value.name!r} has shape {list(tensor.shape)}", "Dims of size 0 or more")
    if isinstance(tensor, onnx_ir.ExternalTensor):
        _check_external(tensor, value.name or "", folder)
    elif isinstance(tensor, onnx_ir.TensorProtoTensor):
        stored = tensor.raw
        if stored.HasField("raw_data") and len(stored.raw_data) != tensor.nbytes:
            raise ModelError(
                f"initializer {value.name!r} of shape {list(tensor.shape)} has {len(stored.raw_data)} bytes",
                f"{tensor.nbytes} bytes",
                "Export it again; it may be truncated",
            )


def _check_external(tensor: onnx_ir.ExternalTensor, name: str, folder: Path) -> None:
    location = str(tensor.location)
    allowed = "A file inside the model's folder, named by a relative path without '..'"
    parts = PurePosixPath(location).parts + PureWindowsPath(location).parts
    absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).is_absolute()
    if absolute or PureWindowsPath(location).drive or ".." in parts or "\0" in location or not location:
        raise ModelError(f"tensor {name!r} is stored at {location!r}", allowed)
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise ModelError(f"tensor {name!r} is stored at {location!r}, a link out of the folder", allowed)
    if not file.is_file():
        raise ModelError(
            f"tensor {name!r} is stored at {location!r}, which is no file", allowed, "Copy it beside the model"
        )
    offset, size = tensor.offset or 0, file.stat().st_size
    length = tensor.nbytes if tensor.length is None else tensor.length
    if offset < 0 or length != tensor.nbytes or offset + length > size:
        raise ModelError(
            f"tensor {name!r} takes bytes {offset} to {offset + length} of {location!r}",
            f"{tensor.nbytes} bytes within the file's {size}",
            "Export it again; the file may be truncated",
        )
