"""What `compile_model` returns: the plan, the programs of every rank, and ways to run, save and look at them."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from stpart_compiler.cost_models.cluster import Cluster, load_cluster, presets
from stpart_compiler.cost_models.resting import phases_of
from stpart_compiler.cost_models.simulate import simulate
from stpart_compiler.cost_models.timeline import Simulation
from stpart_compiler.inspect.text import dump_annotated, plan_table, to_dot
from stpart_compiler.ir.artifact import Deferred, Interface, RankArtifact
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.codegen import Placement
from stpart_compiler.passes.emit_fx import emit_fx
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.pauses import without_gc
from stpart_compiler.runtime.agree import check_same_programs, is_online, local_engine
from stpart_compiler.runtime.buckets import Buckets, Padding, Place
from stpart_compiler.runtime.calls import Sizes, call_leaves, call_sizes, compiled_sizes, differs_in_sizes_only
from stpart_compiler.runtime.materialize import materialize
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.runner import StepResult, run_in_process
from stpart_compiler.runtime.step import Backward, Sized

# Tracing changes what is global, and the threads of several ranks may ask for it.
_COMPILING = threading.Lock()

Initializer = Callable[[str, torch.Tensor], object]


@dataclass(frozen=True)
class RankModules:
    """Forward and backward GraphModules of one rank; `.forward.code` is readable Python. No backward: inference."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None


class CompiledModel:
    """A plan with the verified programs of all ranks.

    Parameters come from the model that was compiled, from a state dict (`load_state_dict`), or, for a meta model, from
    an initializer (`initialize`); each rank takes its blocks. `again` compiles the same model for another call under
    the same plan; it keeps the model alive. `defer` makes the programs of `RankModule.no_sync`, of all ranks.
    `buckets`: sizes that rank modules pad inputs to.
    """

    def __init__(
        self,
        plan: Plan,
        interface: Interface,
        artifacts: list[RankArtifact],
        graph: Annotated | None,
        placement: Placement | None,
        model: nn.Module | None,
        again: Callable[[tuple[Any, ...], dict[str, Any]], CompiledModel] | None = None,
        defer: Callable[[], list[Deferred]] | None = None,
        buckets: Mapping[Place, Buckets] | None = None,
    ) -> None:
        self.plan = plan
        self.interface = interface
        self.artifacts = artifacts
        self._graph = graph
        self._placement = placement
        self._model = model
        self._state: Mapping[str, torch.Tensor] | None = None
        self._initializer: Initializer | None = None
        self._programs: dict[int, RankModules] = {}
        self._again = again
        self._defer = defer
        self._buckets = buckets
        self._by_sizes = {compiled_sizes(interface): self}

    def __repr__(self) -> str:
        return f"CompiledModel({self.plan.summary()})"

    @property
    def world_size(self) -> int:
        return self.interface.mesh.world_size

    def program(self, rank: int) -> RankModules:
        """Forward and backward GraphModules of a rank.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank: {rank} is not in 0..{self.world_size - 1}, the ranks of mesh {self.interface.mesh}"
            )
        if rank not in self._programs:
            artifact = self.artifacts[rank]
            backward = emit_fx(artifact.backward) if artifact.backward is not None else None
            self._programs[rank] = RankModules(emit_fx(artifact.forward), backward)
        return self._programs[rank]

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take parameters and buffers from whole tensors under the model's own names."""
        self._state = state

    def initialize(self, initializer: Initializer) -> None:
        """Fill parameters by `initializer(name, whole_tensor)`, one whole tensor at a time."""
        self._initializer = initializer

    def local_state(
        self, rank: int, device: torch.device | str = "cpu"
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Local parameters and buffers of a rank, as new tensors."""
        return materialize(
            self.interface,
            rank,
            model=self._model if self._state is None and self._initializer is None else None,
            state_dict=self._state,
            initializer=self._initializer,
            device=device,
        )

    def rank_module(self, rank: int, engine: Any = None, device: torch.device | str = "cpu") -> RankModule:
        """Module of a rank: local parameters, differentiable forward. It runs once given an engine (`local_module`)."""
        programs = self.program(rank)
        params, buffers = self.local_state(rank, device)
        more = _OtherSizes(self, rank) if self._again is not None else None
        padding = Padding(self._buckets, self.interface.inputs) if self._buckets else None
        return RankModule(
            self.artifacts[rank],
            programs.forward,
            programs.backward,
            params,
            buffers,
            engine,
            more,
            self._split(rank),
            padding,
        )

    def _split(self, rank: int) -> _Split | None:
        has_it = self._defer is not None or self.artifacts[rank].deferred is not None
        return _Split(self, rank) if has_it and self.interface.training else None

    def deferred(self, rank: int) -> Deferred:
        """Backward of a rank in two programs, for `RankModule.no_sync`. The first call makes those of all ranks."""
        with _COMPILING:
            if self.artifacts[rank].deferred is None:
                assert self._defer is not None, "a loaded model has them or not"
                for artifact, deferred in zip(self.artifacts, self._defer(), strict=True):
                    artifact.deferred = deferred
        found = self.artifacts[rank].deferred
        assert found is not None
        return found

    def sized(self, leaves: list[Any]) -> CompiledModel:
        """This model for the sizes of a call: compiled once more under the same plan where they are new."""
        sizes = call_sizes(leaves)
        if self._again is None or not differs_in_sizes_only(self.interface, leaves):
            return self
        with _COMPILING:
            if sizes not in self._by_sizes:
                with _told(sizes):
                    self._by_sizes[sizes] = self._again(*tree_unflatten(leaves, self.interface.in_spec))
            return self._by_sizes[sizes]

    def local_module(self, timeout_s: float = 600.0, device: torch.device | str | None = None) -> RankModule:
        """Module of this process's rank, inside torchrun or an initialised process group.

        Called with inputs of other sizes it compiles once more, for which it keeps the model that was compiled.

        Raises:
            RuntimeError: no process group, another world size, or the ranks do not hold the same plan.
        """
        engine = local_engine(self.artifacts, timeout_s)
        return self.rank_module(engine.rank, engine, device if device is not None else "cpu")

    def run_in_process(self, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> StepResult:
        """One step of all ranks in this process, a thread and a real gloo group each, on the global inputs.

        These are never padded.
        """
        states = [self.local_state(rank) for rank in range(self.world_size)]
        sized = self.sized(call_leaves(self.interface, args, kwargs))
        programs = [sized.program(rank) for rank in range(self.world_size)]
        return run_in_process(
            sized.artifacts,
            [(p.forward, p.backward) for p in programs],
            [params for params, _ in states],
            [buffers for _, buffers in states],
            args,
            kwargs,
            timeout_s=timeout_s,
        )

    def simulate(self, cluster: str | Path | Cluster | None = None) -> Simulation:
        """One step of all ranks' programs on a cluster, by the cost models: times, timeline, exposed communication.

        `cluster`: name of a preset, path of a TOML, or Cluster; None: the one that the plan was made for.

        Raises:
            ValueError: no such cluster, or one that joins fewer ranks.
        """
        steps = [phases_of(artifact) for artifact in self.artifacts]
        with without_gc():
            return simulate(steps, self._cluster() if cluster is None else load_cluster(cluster))

    def _cluster(self) -> Cluster:
        if self._placement is not None:
            cluster: Cluster = self._placement.cost.cluster
            return cluster
        name = self.plan.solver.get("cluster")
        if name not in presets():
            raise ValueError(f"simulate: the plan was made for {name!r}, which is no preset; say which cluster it is")
        return load_cluster(name)

    def dump(self) -> str:
        """The annotated joint graph, one value a line."""
        graph, placement = self._annotated()
        return dump_annotated(graph, placement)

    def dot(self) -> str:
        """DOT text of the annotated graph."""
        graph, placement = self._annotated()
        return to_dot(graph, placement)

    def table(self) -> str:
        """The plan per module: strategy, layouts, bytes moved, cost."""
        return plan_table(self.plan)

    def _annotated(self) -> tuple[Annotated, Placement]:
        if self._graph is None or self._placement is None:
            raise RuntimeError("dump: a loaded model holds programs only; compile it to look at its joint graph")
        return self._graph, self._placement

    def save(self, directory: str | Path) -> None:
        """Write the plan, all ranks' programs (also those of `no_sync`) and their parameters, for `load_compiled`."""
        if self._split(0) is not None:
            self.deferred(0)
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / "plan.json").write_text(self.plan.to_json())
        (path / "meta.json").write_text(json.dumps({"ranks": self.world_size, "torch": torch.__version__}))
        for artifact in self.artifacts:
            with (path / f"rank{artifact.rank}.programs").open("wb") as file:
                pickle.dump(artifact, file)
            if self._has_values():
                torch.save(self.local_state(artifact.rank), path / f"rank{artifact.rank}.pt")

    def _has_values(self) -> bool:
        if self._state is not None or self._initializer is not None:
            return True
        return self._model is not None and all(not p.is_meta for p in self._model.parameters())


@contextlib.contextmanager
def _told(sizes: Sizes) -> Iterator[None]:
    """Errors within say what was compiled, and what to do instead."""
    try:
        yield
    except ValueError as error:
        error.add_note(
            f"raised while compiling for a call with inputs of other sizes, {sizes}: leave such calls out"
            " (drop_last=True in a DataLoader), or compile a second model for them"
        )
        raise


class _Shared:
    """What a rank module compiles with. Its copies share it; a pickled one goes without."""

    def __init__(self, compiled: CompiledModel, rank: int) -> None:
        self.compiled = compiled
        self.rank = rank

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()


def _none() -> None:
    return None


class _OtherSizes(_Shared):
    """Compiles for calls of a rank module with other sizes."""

    def __call__(self, leaves: list[Any]) -> Sized:
        sized = self.compiled.sized(leaves)
        if is_online():
            check_same_programs(sized.interface, [program for a in sized.artifacts for program in a.programs])
        programs = sized.program(self.rank)
        return Sized(sized.artifacts[self.rank], programs.forward, programs.backward, sized._split(self.rank))


class _Split(_Shared):
    """Makes the programs of `no_sync` for a rank module."""

    def __call__(self) -> Backward:
        compiled = self.compiled
        deferred = compiled.deferred(self.rank)
        if is_online():
            everyones = [program for rank in range(compiled.world_size) for program in compiled.deferred(rank).programs]
            check_same_programs(compiled.interface, everyones)
        return Backward(deferred, emit_fx(deferred.accumulate), emit_fx(deferred.reduce))


class LoadedModel(CompiledModel):
    """A compiled model read from a directory: parameters come from the saved blocks."""

    def __init__(self, plan: Plan, artifacts: list[RankArtifact], directory: Path) -> None:
        super().__init__(plan, artifacts[0].interface, artifacts, None, None, None)
        self._directory = directory

    def local_state(
        self, rank: int, device: torch.device | str = "cpu"
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        path = self._directory / f"rank{rank}.pt"
        if self._state is not None or self._initializer is not None or not path.exists():
            return super().local_state(rank, device)
        params, buffers = torch.load(path, map_location=device)
        return params, buffers

    def _has_values(self) -> bool:
        return (self._directory / "rank0.pt").exists() or super()._has_values()


def load_compiled(directory: str | Path) -> CompiledModel:
    """Read what `CompiledModel.save` wrote.

    Only load directories you trust: programs are stored with pickle.

    Raises:
        ValueError: no compiled model there, or one made with another torch version.
    """
    path = Path(directory)
    if not (path / "meta.json").exists():
        raise ValueError(
            f"load_compiled: {path} holds no compiled model (meta.json is missing); give a directory that save() wrote"
        )
    meta = json.loads((path / "meta.json").read_text())
    if meta["torch"] != torch.__version__:
        raise ValueError(
            f"load_compiled: {path} was made with torch {meta['torch']}, this is torch {torch.__version__};"
            " compile again"
        )
    artifacts = []
    for rank in range(meta["ranks"]):
        with (path / f"rank{rank}.programs").open("rb") as file, warnings.catch_warnings():
            # torch's own class LeafSpec warns when a TreeSpec is unpickled.
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            artifacts.append(pickle.load(file))
    return LoadedModel(Plan.from_json((path / "plan.json").read_text()), artifacts, path)
