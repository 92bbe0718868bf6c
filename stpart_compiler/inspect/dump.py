"""Numbered files of what each pass made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import fx

from stpart_compiler.inspect.table import plan_table
from stpart_compiler.inspect.text import dump_rules
from stpart_compiler.ir.artifact import RankArtifact
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.emit_fx import annotated_code, emit_fx
from stpart_compiler.passes.propagate import Annotated


class Dumper:
    """Writes `00_capture.txt`, `01_decompose.txt`, `02_propagate.txt`, `03_plan.json`, `03_plan.txt`,
    `04_rank0_forward.py`, ...: one number a pass, in the order of the calls.

    Does nothing where `dump_dir` is None. The directory is made; files of the same names are replaced.
    """

    def __init__(self, dump_dir: str | Path | None) -> None:
        self.dir = Path(dump_dir) if dump_dir is not None else None
        self._next = 0
        if self.dir is not None:
            self.dir.mkdir(parents=True, exist_ok=True)

    def graph(self, name: str, gm: fx.GraphModule) -> None:
        """A joint graph as Python, with shapes."""
        if self.dir is not None:
            self._write({f"{name}.txt": gm.print_readable(print_output=False)})

    def annotated(self, graph: Annotated) -> None:
        """The ops with their factor rules and classes."""
        if self.dir is not None:
            self._write({"propagate.txt": dump_rules(graph)})

    def plan(self, plan: Plan) -> None:
        """The plan as JSON, and for readers its summary and its whole table."""
        if self.dir is not None:
            table = f"{plan.summary()}\n\n{plan_table(plan, verbose=True)}"
            self._write({"plan.json": plan.to_json(), "plan.txt": table})

    def programs(self, artifacts: Sequence[RankArtifact]) -> None:
        """Every rank's programs as Python, each line with where it comes from."""
        if self.dir is None:
            return
        files = {}
        for artifact in artifacts:
            for program in (artifact.forward, artifact.backward):
                if program is not None:
                    files[f"rank{artifact.rank}_{program.phase}.py"] = annotated_code(emit_fx(program))
        self._write(files)

    def _write(self, files: dict[str, str]) -> None:
        assert self.dir is not None
        for name, text in files.items():
            (self.dir / f"{self._next:02d}_{name}").write_text(text if text.endswith("\n") else text + "\n")
        self._next += 1
