"""Read an ONNX file that may be broken or hostile, without reading its weights.

The path is resolved first: with a bare file name `onnx_ir` would skip its own checks of external data. External tensors
must lie in the model's folder, as ordinary files, long enough. Entry point: `read_onnx`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import onnx_ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no stubs
from onnx_ir.passes.common import InlinePass
from onnx_ir.serde import SerdeError

from ir.errors import ModelError, first_line
from pdv.frontend.onnx.inner import lift
from pdv.frontend.onnx.origins.unnamed import promote
from pdv.frontend.onnx.proto import check_proto, external_tensors, fill_sparse

EXTERNAL = {"location", "offset", "length", "checksum"}
BYTES = {"offset", "length"}  # of EXTERNAL, those that are numbers
MOST_DIGITS = 20  # of 2^64: no file is longer
MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ZeroDivisionError,
    OverflowError,
    MemoryError,
    RuntimeError,
)
"""What libraries and handlers raise on a missing operand, a wrong attribute, a name in no encoding."""


def read_onnx(path: Path) -> onnx_ir.Model:
    """The model, nodes sorted, functions inlined, external data checked but not read.

    Raises:
        ModelError: if there is no such file, or it is not a valid model.
    """
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(f"model file {str(path)!r} {reason}", "An .onnx file", "Check the path")
    with refusing(path):
        model = _load(path.resolve())
    if len(model.graph) == 0 and not model.graph.outputs:
        raise ModelError(f"{path} is not a readable ONNX model: its graph is empty", "", "Export it again")
    for value in model.graph.initializers.values():
        try:
            _check_initializer(value)
        except MALFORMED as error:
            raise ModelError(f"initializer {value.name!r} is malformed: {first_line(error)}") from error
    with refusing(path):
        if model.functions:
            model = InlinePass()(model).model
    promote(model)
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(
            f"{path} has a cycle: {first_line(error)}", "Nodes that depend on each other in order"
        ) from error
    return model


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a file before its operators are looked at is the file's fault.

    Raises:
        ModelError: in place of what libraries, and handlers of ours, raise on what is malformed.
    """
    try:
        yield
    except (DecodeError, SerdeError, *MALFORMED) as error:
        raise ModelError(
            f"{path} is not a readable ONNX model: {first_line(error)}", "", "Export it again; it may be truncated"
        ) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Without onnx_ir's log lines on what it thinks invalid: what matters comes back as an error."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _load(path: Path) -> onnx_ir.Model:
    with quietly():
        proto = onnx.load(path, load_external_data=False)
        fill_sparse(proto.graph)
        check_proto(proto)
        for tensor in external_tensors(proto):
            _check_place(tensor)
            _check_external(onnx_ir.serde.deserialize_tensor(tensor), tensor.name, path.parent)
        model = onnx_ir.from_proto(lift(proto))
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            onnx_ir.external_data.set_base_dir(graph, path.parent)
        return model


def _check_place(tensor: onnx.TensorProto) -> None:
    """Raises ModelError if a tensor says of its file what no reader knows, a place in it that is no number, or has a
    type whose elements take no number of bits.
    """
    kind = tensor.data_type
    if kind in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING) or kind not in onnx.TensorProto.DataType.values():
        what = f"tensor {tensor.name!r}, stored in a file of its own, has elements of type {kind}"
        raise ModelError(what, "A type of ONNX that is made of numbers", "Export it again")
    unknown = {entry.key for entry in tensor.external_data} - EXTERNAL
    if unknown:
        what = f"tensor {tensor.name!r} says {min(unknown)!r} of where it is stored"
        raise ModelError(what, f"Allowed: {', '.join(sorted(EXTERNAL))}", "Export it again")
    for entry in tensor.external_data:
        number = entry.value
        if entry.key in BYTES and not (number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS):
            raise ModelError(
                f"tensor {tensor.name!r} has the {entry.key} {number[:40]!r} in its file",
                f"A number of bytes, 0 or more, in at most {MOST_DIGITS} decimal digits",
                "Export it again",
            )


def _check_initializer(value: onnx_ir.Value) -> None:
    """Raises ModelError if a stored tensor is missing, of the wrong length or of an impossible shape."""
    tensor = value.const_value
    if tensor is None:
        raise ModelError(f"initializer {value.name!r} has no value")
    if any(not isinstance(size, int) or size < 0 for size in tensor.shape):
        raise ModelError(f"initializer {value.name!r} has shape {list(tensor.shape)}", "Dims of size 0 or more")
    if isinstance(tensor, onnx_ir.TensorProtoTensor):
        stored = tensor.raw
        if stored.HasField("raw_data") and len(stored.raw_data) != tensor.nbytes:
            raise ModelError(
                f"initializer {value.name!r} of shape {list(tensor.shape)} has {len(stored.raw_data)} bytes",
                f"{tensor.nbytes} bytes",
                "Export it again; it may be truncated",
            )


def _check_external(tensor: onnx_ir.TensorProtocol, name: str, folder: Path) -> None:
    """Raises ModelError if a tensor's file is not in the folder, no ordinary file, or too short."""
    assert isinstance(tensor, onnx_ir.ExternalTensor), tensor
    location = str(tensor.location)
    allowed = "A file inside the model's folder, named by a relative path without '..'"
    parts = PurePosixPath(location).parts + PureWindowsPath(location).parts
    absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).is_absolute()
    if absolute or PureWindowsPath(location).drive or ".." in parts or "\0" in location or not location:
        raise ModelError(f"tensor {name!r} is stored at {location!r}", allowed)
    try:
        file = (folder / location).resolve()
        ordinary, size = file.is_file(), file.stat().st_size if file.is_file() else 0
    except (OSError, RuntimeError) as error:  # links that lead to one another, names that are too long
        raise ModelError(f"tensor {name!r} is stored at {location!r}: {first_line(error)}", allowed) from error
    if not file.is_relative_to(folder):
        raise ModelError(f"tensor {name!r} is stored at {location!r}, a link out of the folder", allowed)
    if not ordinary:
        raise ModelError(
            f"tensor {name!r} is stored at {location!r}, which is no file", allowed, "Copy it beside the model"
        )
    offset = tensor.offset or 0
    length = tensor.nbytes if tensor.length is None else tensor.length
    if offset < 0 or length != tensor.nbytes or offset + length > size:
        raise ModelError(
            f"tensor {name!r} takes bytes {offset} to {offset + length} of {location!r}",
            f"{tensor.nbytes} bytes within the file's {size}",
            "Export it again; the file may be truncated",
        )
