"""Two ranks calibrate, with few and small measurements: run by tests/runtime/test_calibrate.py under torchrun."""

import sys
from pathlib import Path

from stpart_compiler.runtime import calibrate

calibrate.DTYPES = ("float32",)
calibrate.SIZES = {"cpu": (16, 32)}
calibrate.MESSAGE_BYTES = (2**8, 2**12)
calibrate.REPEATS, calibrate.SECONDS = 1, 0.0

if __name__ == "__main__":
    calibrate.calibrate_here(Path(sys.argv[1]))
