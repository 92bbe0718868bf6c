"""Plans on disk: compiling the same step once more takes its plan without solving.

A plan is found by what it was made from: the graph and its rules, mesh, cluster, memory limit and options, and the
versions of what solved. So an entry never grows stale; of many entries the least recently used go.

Entries stand in `$XDG_CACHE_HOME/stpart_compiler/plans` (`~/.cache` where that is not set). The environment variable
STPART_CACHE names another directory; `off` (or `0`) switches the cache off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.propagate import Annotated

VARIABLE = "STPART_CACHE"
OFF = ("off", "0")
MOST_PLANS = 256


@dataclasses.dataclass(frozen=True)
class PlanCache:
    """The entry of one problem. `path` None: the cache is switched off."""

    path: Path | None

    def load(self) -> Plan | None:
        """The plan made before; None where there is none. One that cannot be read is left out with a warning."""
        if self.path is None or not self.path.exists():
            return None
        try:
            digest, _, text = self.path.read_text(encoding="utf-8").partition("\n")
            if digest != _digest([self.path.stem, text]):
                raise ValueError("its contents are not what was written")
            plan = Plan.from_json(text)
            os.utime(self.path)  # used just now: the others go first
        except (OSError, ValueError) as error:
            warnings.warn(f"plan cache: {self.path} is left out and made anew ({error})", stacklevel=2)
            return None
        plan.solver["cached"] = True
        return plan

    def store(self, plan: Plan) -> None:
        """Keep a plan. Another process sees all of it or nothing. Where it cannot be written, a warning says so."""
        if self.path is None:
            return
        text = plan.to_json()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, f"{_digest([self.path.stem, text])}\n{text}")
            _drop_oldest(self.path.parent)
        except OSError as error:
            warnings.warn(
                f"plan cache: cannot write {self.path} ({error}); set {VARIABLE} to another directory, or to off",
                stacklevel=2,
            )


def plan_cache(
    graph: Annotated,
    mesh: Mesh,
    cluster: Cluster,
    memory_limit: int,
    options: SolverOptions,
    template: str | None,
    further: Iterable[object],
) -> PlanCache:
    """The entry of a problem. `mesh`: as the user gave it; `further`: what else a plan depends on, by its repr."""
    folder = _folder()
    if folder is None:
        return PlanCache(None)
    asked = (mesh, cluster, memory_limit, dataclasses.asdict(options), template)
    rules = [f"{members[0].rule!r}{sorted(members[0].movable)}" for members in graph.classes]
    ops = [f"{op.name} {op.module_path} {op.klass} {op.checkpoint}" for op in graph.ops]  # not all of it in the digest
    key = _digest([graph.digest, *rules, *ops, *map(repr, asked), *map(repr, further), *_versions()])
    return PlanCache(folder / f"{key}.plan")


def _folder() -> Path | None:
    given = os.environ.get(VARIABLE, "")
    if given.lower() in OFF:
        return None
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "stpart_compiler" / "plans" if os.path.isabs(base) else None  # no home: nowhere to keep it


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} ".encode())
        digest.update(text.encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _versions() -> tuple[str, ...]:
    """Of torch, of ortools, and of this package: its code, since an editable one changes under one version."""
    package = Path(__file__).parent
    folders = (package, package / "passes", package / "cost_models")  # links, which a search from above does not follow
    files = {file.resolve() for folder in folders for file in folder.rglob("*.py")}
    code = _digest(text for file in sorted(files) for text in (file.name, file.read_text(encoding="utf-8")))
    return torch.__version__, version("ortools"), code


def _replace(path: Path, text: str) -> None:
    """Write a file at once: under another name first."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _drop_oldest(folder: Path) -> None:
    """Keep the entries used last. Another process may drop some meanwhile."""
    times: dict[Path, float] = {}
    for path in folder.glob("*.plan"):
        try:
            times[path] = path.stat().st_mtime
        except FileNotFoundError:
            continue
    for path in sorted(times, key=times.__getitem__)[:-MOST_PLANS]:
        path.unlink(missing_ok=True)
