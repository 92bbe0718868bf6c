"""Which ops of many model families have rules of their own, rules found by running them, or none.

    python benchmarks/coverage.py [MODEL ...]

The models are those of tests/zoo.py, at tiny sizes, forward and backward. Ops without a rule run whole on every rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate
from stpart_compiler.inspect.doctor import Diagnosis, diagnose

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import zoo


def diagnosed(name: str) -> tuple[int, int, Diagnosis, list[str]]:
    """Number of ops, of kinds of ops, the diagnosis, and the kinds without any rule."""
    step = zoo.make(name)
    graph = annotate(capture(step.model, step.args, dict(step.kwargs), loss_fn=step.loss_fn))
    kinds = {str(op.call.target) for op in graph.ops}
    without = sorted({str(op.call.target) for op in graph.ops if not op.has_rule})
    return len(graph.ops), len(kinds), diagnose(graph), without


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(zoo.ZOO)}; all if none is given")
    names = parser.parse_args().models or list(zoo.ZOO)
    print(f"{'model':12} {'ops':>5} {'kinds':>5} {'own':>5} {'found':>5} {'none':>5}")
    without: set[str] = set()
    for name in names:
        ops, kinds, diagnosis, none = diagnosed(name)
        counts = f"{len(diagnosis.own):5} {len(diagnosis.discovered):5} {len(none):5}"
        print(f"{name:12} {ops:5} {kinds:5} {counts}  {', '.join(none)}", flush=True)
        without |= set(none)
    print(f"kinds without a rule: {', '.join(sorted(without)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
