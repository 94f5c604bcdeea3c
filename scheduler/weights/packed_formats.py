"""Which `PackedFormat` the configuration of a checkpoint declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.weights.integer_formats import awq_format, compressed_format, gptq_format, torchao_format
from scheduler.weights.packed_format import PackedFormat
from scheduler.weights.table_formats import bitsandbytes_format, fp8_format, mxfp4_format

_FORMATS = {
    "gptq": gptq_format,
    "awq": awq_format,
    "compressed-tensors": compressed_format,
    "torchao": torchao_format,
    "fp8": fp8_format,
    "mxfp4": mxfp4_format,
    "bitsandbytes": bitsandbytes_format,
}
_AUTOROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq", "auto_round:gptq": "gptq"}


def format_of(said: Any) -> PackedFormat | None:
    """The format that the ``quantization_config`` of a checkpoint declares; None where we do not read it."""
    if not isinstance(said, Mapping):
        return None
    method = str(said.get("quant_method", "")).lower()
    if method == "auto-round":
        layout = str(said.get("packing_format", "")).lower()
        method = _AUTOROUND.get(layout, "")
        said = {name: value for name, value in said.items() if name != "packing_format"}
    read = _FORMATS.get(method)
    return None if read is None else read(said)
