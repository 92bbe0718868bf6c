"""`torch.compile(model, backend="stpart", options={"mesh": (2, 2), ...})`.

Parameters stay whole on every rank here, since dynamo guards their shapes; activations and compute are partitioned.
Each shape of the inputs gets a plan of its own, made at the first call with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from stpart_compiler.compile import Restrictions, compile_model
from stpart_compiler.passes.solve import SolverOptions
from stpart_compiler.runtime.agree import is_online, local_engine
from stpart_compiler.runtime.rank_module import RankModule

_OPTIONS = ("mesh", "memory_limit", "cluster", "template", "solver", "timeout_s")


class GraphBreakInModelError(RuntimeError):
    """torch.compile cut the model in pieces, which cannot be partitioned as one step."""


def stpart(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend entry: called by torch.compile with a whole model's graph.

    Options: mesh (needed), memory_limit, cluster, template, solver as in `compile_model`; timeout_s for communication.

    Raises:
        ValueError: an unknown option, or no mesh.
        GraphBreakInModelError: the graph is a piece of the model only.
    """
    options = dict(options or {})
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"backend stpart: unknown options {unknown}; expected some of {', '.join(_OPTIONS)}")
    if "mesh" not in options:
        raise ValueError('backend stpart: give a mesh, as in options={"mesh": (2, 2)}')
    _refuse_graph_break(gm)
    return torch._dynamo.disable(_Compiled(gm, options))  # type: ignore[no-any-return]


def _refuse_graph_break(gm: fx.GraphModule) -> None:
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return
    frames = [f"{frame.filename}:{frame.lineno}" for frame in (reason.user_stack or ())]
    where = f" at {frames[-1]}" if frames else ""
    raise GraphBreakInModelError(
        f"backend stpart: the model has a graph break{where}: {reason.reason}. A step must be one graph to be"
        " partitioned: remove what breaks it, and compile with fullgraph=True to see all breaks"
    )


class _Whole(nn.Module):
    """The dynamo graph as a module: parameters among its arguments become parameters, the rest stays an input."""

    def __init__(self, gm: fx.GraphModule, args: Sequence[Any]) -> None:
        super().__init__()
        self.gm = gm
        self.is_param = [isinstance(arg, nn.Parameter) for arg in args]
        for i, arg in enumerate(args):
            if self.is_param[i]:
                self.register_parameter(f"p{i}", arg)

    def forward(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        args = [getattr(self, f"p{i}") if is_param else next(rest) for i, is_param in enumerate(self.is_param)]
        return self.gm(*args)


class _Compiled:
    """Runs the partitioned step; compiles when the shapes are new."""

    def __init__(self, gm: fx.GraphModule, options: dict[str, Any]) -> None:
        self.gm = gm
        self.timeout_s = options.pop("timeout_s", 600.0)
        self.options = options
        self.modules: dict[tuple[Any, ...], RankModule] = {}

    def __call__(self, *args: Any) -> Any:
        inputs = [arg for arg in args if not isinstance(arg, nn.Parameter)]
        key = tuple(_described(arg) for arg in args), torch.is_grad_enabled()
        if key not in self.modules:
            self.modules[key] = self._compile(args, inputs)
        return self.modules[key](*inputs)

    def _compile(self, args: Sequence[Any], inputs: list[Any]) -> RankModule:
        whole = _Whole(self.gm, args)
        solver = self.options.get("solver")
        options = {name: value for name, value in self.options.items() if name != "solver"}
        compiled = compile_model(
            whole,
            inputs,
            training=torch.is_grad_enabled() and any(p.requires_grad for p in whole.parameters()),
            solver=solver if solver is None or isinstance(solver, SolverOptions) else SolverOptions(**solver),
            restrictions=Restrictions(whole_parameters=True),
            **options,
        )
        programs = compiled.program(0)
        if compiled.world_size == 1:
            return _module(compiled, 0, programs, whole, None)
        if not is_online():
            raise RuntimeError(
                f"backend stpart: mesh {compiled.interface.mesh} has {compiled.world_size} ranks but there is no process"
                " group; start under torchrun and call torch.distributed.init_process_group first"
            )
        engine = local_engine(compiled.interface, self.timeout_s)
        return _module(compiled, engine.rank, compiled.program(engine.rank), whole, engine)


def _module(compiled: Any, rank: int, programs: Any, whole: _Whole, engine: Any) -> RankModule:
    """Rank module over the user's own parameters, so that their gradients arrive there."""
    params = dict(whole.named_parameters())
    return RankModule(compiled.artifacts[rank], programs.forward, programs.backward, params, {}, engine)


def _described(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape), arg.dtype, arg.requires_grad
    return arg
