"""Two ranks calibrate, with few and small measurements: run by tests/runtime/test_calibrate.py under torchrun."""

import sys
from pathlib import Path

from stpart_compiler.runtime import bench, calibrate

calibrate.DTYPES = ("float32",)
bench.SIZES = {"cpu": (16, 32)}
bench.STREAM_BYTES = {"cpu": (2**12, 2**16)}
bench.ATTENTION_ROWS = {"cpu": (16, 32)}
bench.POOL_BYTES = {"cpu": 2**16}
bench.MESSAGE_BYTES = (2**8, 2**12)
bench.SAMPLES, bench.SAMPLE_S = 1, 0.0

if __name__ == "__main__":
    calibrate.calibrate_here(Path(sys.argv[1]))
