"""`torch.compile(model, backend="stpart", options={"mesh": (2, 2), ...})`.

Parameters stay whole on every rank here, since dynamo guards their shapes; activations and compute are partitioned.
A model that dynamo cuts in pieces is refused. Where dynamo gives a function up before it has found anything to compile,
it runs the function in Python and never calls the backend: fullgraph=True turns that into an error too.

Each shape of the inputs gets a plan of its own, made at the first call with it: where dynamo's graph is symbolic in a
size, the graph is specialised to the size of the call.
"""

from __future__ import annotations

import linecache
import operator
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from stpart_compiler.capture import GraphBreakError
from stpart_compiler.compile import compile_model
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.runtime.agree import check_world, is_online, local_engine
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.search import Restrictions

_OPTIONS = ("mesh", "memory_limit", "cluster", "template", "solver", "timeout_s")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_SITE = f"{os.sep}site-packages{os.sep}"  # lies inside of the standard library's folder
_ENTRY = "compile_wrapper"  # torch's function in which all that torch.compile compiles is called
_FIX = (
    "A step must be one graph to be partitioned: remove what breaks it, or compile only the part without it; "
    "torch.compile(..., fullgraph=True) stops at each break with dynamo's full explanation"
)


def stpart(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend entry: called by torch.compile with a whole model's graph.

    Options: mesh (needed), memory_limit, cluster, template, solver (SolverOptions or a dict of its fields) as in
    `compile_model`; timeout_s: seconds each wait for a message may take.

    Raises (torch.compile wraps them in its own BackendCompilerFailed, which shows the message):
        ValueError: an unknown option, no mesh or a bad one.
        RuntimeError: several ranks, but no process group.
        GraphBreakError: the graph is a piece of the model only.
    """
    options = dict(options or {})
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"backend stpart: unknown options {unknown}; expected some of {', '.join(_OPTIONS)}")
    if "mesh" not in options:
        raise ValueError('backend stpart: give a mesh, as in options={"mesh": (2, 2)}')
    _check_ranks(parse_mesh(options["mesh"]))
    _refuse_graph_break(gm)
    return torch._dynamo.disable(_Compiled(gm, options))  # type: ignore[no-any-return]


def _check_ranks(mesh: Mesh) -> None:
    check_world(mesh)
    if mesh.world_size > 1 and not is_online():
        raise RuntimeError(
            f"backend stpart: mesh {mesh} has {mesh.world_size} ranks but there is no process group; start under"
            " torchrun and call torch.distributed.init_process_group first"
        )


def _refuse_graph_break(gm: fx.GraphModule) -> None:
    """Raise if dynamo cut the model: at the end of this piece, or (it says nothing then) before its start."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        stack = _places(reason)
        own = [place for place in stack if _is_users(place[0])] or stack
        raise _graph_break(own[-1] if own else None, str(reason.reason))
    frame = _caller_inside_model()
    if frame is not None:
        place = (frame.f_code.co_filename, frame.f_lineno)
        raise _graph_break(place, _noted_reason(place))


def _places(reason: Any) -> list[tuple[str, int]]:
    return [(frame.filename, frame.lineno) for frame in reason.user_stack or ()]


def _noted_reason(place: tuple[str, int]) -> str:
    """What dynamo noted when it cut at this line of the model."""
    for reason in reversed(torch._dynamo.utils.graph_break_reasons):
        if place in _places(reason):
            return str(reason.reason)
    return "dynamo left this function to Python, and compiles what it calls one by one"


def _graph_break(place: tuple[str, int] | None, why: str) -> GraphBreakError:
    where = f" at {place[0]}:{place[1]}" if place else ""
    line = linecache.getline(*place).strip() if place else ""
    code = f" in `{line}`" if line else ""
    if why.startswith("generic_jump"):
        why = "a branch depends on tensor data"
    if why == "step_unsupported":
        why = "dynamo cannot trace a construct at or after this line"
    short = re.split(r"\n\s*(?:Hint|Developer debug context|Caused by|from user code)", why)[0].strip()
    return GraphBreakError(f"backend stpart: graph break{where}{code}: {short}\n{_FIX}")


def _caller_inside_model() -> FrameType | None:
    """The innermost frame of user code, between the call of what torch.compile made and this call of the backend.

    There is none if the graph is of all that was called: dynamo compiles a function before it runs.
    """
    frame = sys._getframe()
    found = None
    while frame.f_back is not None and frame.f_code.co_name != _ENTRY:
        if found is None and _is_users(frame.f_code.co_filename):
            found = frame
        frame = frame.f_back
    return found if frame.f_code.co_name == _ENTRY else None


def _is_users(filename: str) -> bool:
    if filename == __file__ or filename.startswith(_TORCH):
        return False
    return not filename.startswith(_STDLIB) or _SITE in filename


@dataclass(frozen=True)
class _Specialised:
    """Dynamo's graph for one set of shapes.

    `gm` takes the tensors at `inputs` of dynamo's arguments; those at `state` are its parameters and buffers, by name.
    """

    gm: fx.GraphModule
    inputs: tuple[int, ...]
    state: dict[str, int]


def _specialise(gm: fx.GraphModule, args: Sequence[Any]) -> _Specialised:
    """Numbers among the arguments become constants, parameters and buffers attributes; other tensors stay inputs.

    A tensor that needs a gradient counts as a parameter, since inputs get none.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    inputs: list[int] = []
    state: dict[str, int] = {}
    attributes: dict[str, Any] = {}
    for i, (node, arg) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True)):
        if not isinstance(arg, Tensor):
            copied[node] = arg
        elif _is_state(node, arg):
            name = _state_name(node, attributes)
            attributes[name] = _standing_in(arg)
            state[name] = i
            copied[node] = graph.get_attr(name)
        else:
            inputs.append(i)
            copied[node] = graph.placeholder(node.name)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op in ("get_attr", "call_module"):
            attributes[str(node.target)] = operator.attrgetter(str(node.target))(gm)
        copied[node] = _copied(graph, node, copied)
    return _Specialised(fx.GraphModule(attributes, graph), tuple(inputs), state)


def _copied(graph: fx.Graph, node: fx.Node, copied: dict[fx.Node, Any]) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), copied.__getitem__)
    new = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
    new.meta = dict(node.meta)
    return new


def _is_state(node: fx.Node, arg: Tensor) -> bool:
    """Dynamo marks what belongs to a module as static."""
    static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    return isinstance(arg, nn.Parameter) or static or (arg.requires_grad and torch.is_grad_enabled())


def _standing_in(arg: Tensor) -> Tensor:
    if isinstance(arg, nn.Parameter) or not arg.requires_grad:
        return arg
    return nn.Parameter(arg.detach())


def _state_name(node: fx.Node, taken: dict[str, Any]) -> str:
    """`layers.0.weight` for "L['self']._modules['layers']._modules['0']._parameters['weight']"."""
    source = getattr(node, "_dynamo_source", None)
    steps = re.findall(r"[^\W\d]\w*(?=[.\[]|$)|(?<=\[')[^']+(?='\])|(?<=\[)\d+(?=\])", source.name if source else "")
    parts = [step for step in steps[1:] if step not in ("_modules", "_parameters", "_buffers")]
    if parts[:1] == ["self"]:
        del parts[0]
    name = ".".join(parts)
    clash = any(name.startswith(f"{other}.") or other == name or other.startswith(f"{name}.") for other in taken)
    if not parts or clash or hasattr(fx.GraphModule, parts[0]):
        return str(node.name)
    return name


class _Compiled:
    """Runs the partitioned step; compiles when the shapes are new."""

    def __init__(self, gm: fx.GraphModule, options: dict[str, Any]) -> None:
        self.gm = gm
        self.timeout_s = options.pop("timeout_s", 600.0)
        self.options = options
        self.steps: dict[tuple[Any, ...], _Step] = {}

    def __call__(self, *args: Any) -> Any:
        key = (torch.is_grad_enabled(), *map(_described, args))
        if key not in self.steps:
            self.steps[key] = self._compile(args)
        return self.steps[key](args)

    def _compile(self, args: Sequence[Any]) -> _Step:
        special = _specialise(self.gm, args)
        options = dict(self.options)
        solver = options.pop("solver", None)
        compiled = compile_model(
            special.gm,
            [args[i] for i in special.inputs],
            training=torch.is_grad_enabled() and any(p.requires_grad for p in special.gm.parameters()),
            solver=SolverOptions(**solver) if isinstance(solver, dict) else solver,
            restrictions=Restrictions(whole_parameters=True),
            **options,
        )
        engine = local_engine(compiled.artifacts, self.timeout_s) if compiled.world_size > 1 else None
        rank = engine.rank if engine is not None else 0
        programs = compiled.program(rank)
        params, buffers = dict(special.gm.named_parameters()), dict(special.gm.named_buffers())
        module = RankModule(compiled.artifacts[rank], programs.forward, programs.backward, params, buffers, engine)
        return _Step(module, special)


class _Step:
    """A rank module over the user's own parameters and buffers, so that gradients and new values arrive there."""

    def __init__(self, module: RankModule, special: _Specialised) -> None:
        self._module = module
        self._inputs = special.inputs
        self._homes = list(_homes(module, special))

    def __call__(self, args: Sequence[Any]) -> Any:
        # The user may have put other tensors of the same shape in their places; dynamo does not compile again then.
        for table, key, i in self._homes:
            table[key] = args[i]
        return self._module(*(args[i] for i in self._inputs))


def _homes(module: RankModule, special: _Specialised) -> Iterator[tuple[dict[str, Any], str, int]]:
    """(table of a submodule, name there, index of dynamo's argument) of each parameter and buffer."""
    for name, i in special.state.items():
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        yield owner._parameters if key in owner._parameters else owner._buffers, key, i


def _described(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.dtype, arg.requires_grad
    return arg
