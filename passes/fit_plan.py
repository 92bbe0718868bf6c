"""A plan that is given: is it for this model and mesh, and what it is for other input sizes than those it was made for.

Strategies cut the loop dims of ops, whatever their sizes. So a plan also holds for another batch size or sequence
length, as long as the step then has the same ops over the same dims; blocks, transfers and costs are worked out anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.ir.rule import HALO, WHOLE
from stpart_compiler.ir.spacetime import InvalidStrategyError, Strategy, check_covers, derive
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.plan_rows import plan_rows
from stpart_compiler.passes.problem import BuildProblem, SolverOptions, evaluate, memory_bytes
from stpart_compiler.passes.propagate import Annotated, OpNode
from stpart_compiler.passes.quotient import quotient
from stpart_compiler.passes.space import Choices, ParamChoices, Space
from stpart_compiler.passes.uses import Assignment

_ANEW = "make the plan anew"
_ONE_ANEW = f"a batch or sequence of one needs a plan of its own: {_ANEW}"


@dataclass(frozen=True)
class FitPlan:
    """plan, annotated ops -> the plan for these ops; the same one where it was made for them.

    Raises:
        ValueError: the plan is for another mesh, torch version or model, or a strategy does not apply at these sizes;
            says which.
    """

    costs: Costs
    options: SolverOptions

    def apply(self, plan: Plan, graph: Annotated, mesh: Mesh) -> Plan:
        _check_made_for(plan, mesh)
        digest = graph.digest
        if plan.graph_digest == digest:
            return plan
        _check_same_model(plan, graph)
        plan = _in_pieces(plan, graph)
        for op in graph.ops:
            _check_applies(op, plan.strategies[op.name], plan.mesh)
        return self._priced(replace(plan, graph_digest=digest), graph)

    def _priced(self, plan: Plan, graph: Annotated) -> Plan:
        """The plan with the costs of this graph. No bound is known for it."""
        space = self._only(plan, graph)
        problem = BuildProblem(self.options, again=frozenset(plan.recompute)).apply(space)
        choice: Assignment = dict.fromkeys(problem.roots, 0)
        return replace(
            plan,
            rows=plan_rows(space, problem, choice),
            seconds=evaluate(problem, choice),
            bound_seconds=0.0,
            memory={"solver estimate": memory_bytes(problem, choice)},
            yardsticks={},
            solver={"status": "given", "made for": plan.digest, "cluster": self.costs.cluster.name},
        )

    def _only(self, plan: Plan, graph: Annotated) -> Space:
        """The space in which the plan is all there is: of identical ops, what it says of the first."""
        classes = quotient(graph)
        params = [ParamChoices(p.names, p.value, [plan.params[p.names[0]]]) for p in classes.params]
        choices = [self._choices(members, plan.strategies[members[0].name]) for members in graph.classes]
        return Space(graph, plan.mesh, self.costs, choices, params, classes)

    def _choices(self, members: list[OpNode], strategy: Strategy) -> Choices:
        op = members[0]
        derived = derive(op.rule, strategy, self.costs.mesh)
        seconds, moved = self.costs.op(op, strategy, derived)
        return Choices(op, len(members), [strategy], [derived], [seconds], [moved], op.klass, [[0]])


def _check_made_for(plan: Plan, mesh: Mesh) -> None:
    if plan.mesh.world_size != mesh.world_size:
        raise ValueError(f"plan: made for mesh {plan.mesh}, but the mesh is {mesh}; make a plan for this mesh")
    if plan.torch_version != torch.__version__:
        raise ValueError(
            f"plan: made with torch {plan.torch_version}, but this is torch {torch.__version__}; its graph may differ,"
            f" {_ANEW}"
        )


def _check_same_model(plan: Plan, graph: Annotated) -> None:
    """The same ops and the same parameters, by name; these of the same shape."""
    ops = {op.name for op in graph.ops}
    missing, extra = sorted(set(plan.strategies) - ops), sorted(ops - set(plan.strategies))
    shapes = {info.name: info.info.shape for info in graph.captured.params if info.node is not None}
    planned = {name: layout.shape for name, layout in plan.params.items()}
    params = sorted(name for name in shapes.keys() | planned.keys() if shapes.get(name) != planned.get(name))
    if missing or extra or params:
        raise ValueError(
            f"plan: made for another model, or for inputs with which the step has other ops (ops only in the plan:"
            f" {missing[:5]}, only in the model: {extra[:5]}, parameters that differ: {params[:5]});"
            f" {_ANEW if params else _ONE_ANEW}"
        )


def _in_pieces(plan: Plan, graph: Annotated) -> Plan:
    """The plan for sequences that are not written in stripes at these sizes: what cuts the stripes cuts pieces."""
    strategies = {
        op.name: _over_pieces(op, plan.strategies[op.name], graph.sequences.whole.get(op.name, frozenset()))
        for op in graph.ops
    }
    sequences = graph.sequences
    return replace(plan, strategies=strategies, stripes=sequences.stripes, uneven=list(sequences.uneven))


def _over_pieces(op: OpNode, strategy: Strategy, sequences: frozenset[int]) -> Strategy:
    """A strategy with the digits of rows and stripes on one factor, those of `sequences`."""
    if len(strategy.digits) != len(op.rule.factors) + len(sequences):
        return strategy
    digits = iter(strategy.digits)
    joined = [next(digits) + next(digits) if f in sequences else next(digits) for f in range(len(op.rule.factors))]
    return replace(strategy, digits=tuple(joined))


def _check_applies(op: OpNode, strategy: Strategy, mesh: Mesh) -> None:
    """The strategy cuts dims that the op has and that may be cut, and covers the op."""
    where = f"plan: op {op.name} ({op.module_path or 'the model'}) with the rule {op.rule}"
    if len(strategy.digits) != len(op.rule.factors) or strategy.linear >= len(op.rule.linear):
        raise ValueError(f"{where} is made of other dims at these input sizes than the plan was made for; {_ONE_ANEW}")
    pairs = zip(op.rule.factors, strategy.digits, strict=True)
    whole = [factor.name for factor, digits in pairs if digits and factor.kind in (WHOLE, HALO)]
    if whole:
        raise ValueError(f"{where} must not be cut along {', '.join(whole)} at these input sizes; {_ANEW}")
    try:
        derive(op.rule, strategy, mesh)
        if strategy.steps > 1:
            check_covers(op.rule, strategy, mesh)
    except InvalidStrategyError as error:
        raise ValueError(f"{where}: the strategy does not apply at these input sizes ({error}); {_ANEW}") from error
