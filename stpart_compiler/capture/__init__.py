"""Capture: from an nn.Module and example inputs to one flat joint forward+backward graph of aten ops."""

from stpart_compiler.capture.trace import capture
from stpart_compiler.capture.types import (
    Captured,
    GraphBreakError,
    InputInfo,
    OutputInfo,
    ParamInfo,
    TensorInfo,
)

__all__ = ["Captured", "GraphBreakError", "InputInfo", "OutputInfo", "ParamInfo", "TensorInfo", "capture"]
