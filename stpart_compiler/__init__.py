"""Automatic parallelism in space and time for PyTorch models."""

from stpart_compiler.capture import GraphBreakError
from stpart_compiler.compile import compile_model
from stpart_compiler.compiled import CompiledModel, load_compiled
from stpart_compiler.cost_models.cluster import Cluster, load_cluster, presets
from stpart_compiler.cost_models.timeline import Simulation
from stpart_compiler.inspect.diff import PlanDiff, diff
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.solve import InfeasibleError
from stpart_compiler.passes.templates import templates
from stpart_compiler.passes.verify_rank import VerificationError
from stpart_compiler.runtime.buckets import Buckets
from stpart_compiler.runtime.checkpoint import load_checkpoint, save_checkpoint
from stpart_compiler.runtime.clip import clip_grad_norm_
from stpart_compiler.runtime.engine import CommTimeoutError
from stpart_compiler.runtime.grad_scaler import GradScaler
from stpart_compiler.runtime.runner import StepResult

__all__ = [
    "Buckets",
    "Cluster",
    "CommTimeoutError",
    "CompiledModel",
    "GradScaler",
    "GraphBreakError",
    "InfeasibleError",
    "Mesh",
    "Plan",
    "PlanDiff",
    "Simulation",
    "SolverOptions",
    "StepResult",
    "VerificationError",
    "clip_grad_norm_",
    "compile_model",
    "diff",
    "load_checkpoint",
    "load_cluster",
    "load_compiled",
    "presets",
    "save_checkpoint",
    "templates",
]
