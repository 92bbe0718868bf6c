"""Of plans that cost about the same, the one that is fastest in simulation.

The solver's prices and the simulation of the generated programs differ by a few per cent, so that of a plan and a
template priced almost like it either may be the faster one.
"""

from __future__ import annotations

from collections.abc import Mapping

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.cost_models.resting import phases_of
from stpart_compiler.cost_models.simulate import simulate
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.build_programs import Programs

ABOUT = 0.05
"""A template that is priced higher than the plan by no more than that is simulated."""

MOST = 2
"""So many of them, the cheapest ones: each takes as long as generating the programs did."""

SOLVED = "solved"


def priced_alike(plan: Plan, yardsticks: Mapping[str, float]) -> list[str]:
    """Names of yardsticks (name -> seconds) that may be faster than the plan in simulation."""
    near = [name for name, seconds in yardsticks.items() if seconds <= (1 + ABOUT) * plan.seconds]
    return sorted(near, key=lambda name: yardsticks[name])[:MOST]


def fastest(made: Mapping[str, tuple[Plan, Programs]], cluster: Cluster) -> tuple[Plan, Programs]:
    """The fastest in simulation, the first one of equals; the plan says what each takes. `made[SOLVED]`: the cheapest,
    whose bound holds for all."""
    seconds = {name: _simulated(programs, cluster) for name, (_, programs) in made.items()}
    plan, programs = made[min(seconds, key=lambda name: seconds[name])]
    solved = made[SOLVED][0]
    plan.bound_seconds = min(solved.bound_seconds, plan.seconds)
    plan.yardsticks = solved.yardsticks
    plan.solver["simulated"] = seconds
    return plan, programs


def _simulated(programs: Programs, cluster: Cluster) -> float:
    return simulate([phases_of(artifact) for artifact in programs.artifacts], cluster).seconds
