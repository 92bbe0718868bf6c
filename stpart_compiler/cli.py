"""The `stpart` command: demo, doctor, plan, dump, simulate, run, calibrate."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stpart_compiler.capture import capture
from stpart_compiler.compile import compile_model
from stpart_compiler.compiled import CompiledModel
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.demo import demo
from stpart_compiler.graphs import annotate
from stpart_compiler.inspect.diff import diff
from stpart_compiler.inspect.doctor import diagnose
from stpart_compiler.inspect.table import plan_table
from stpart_compiler.ir.plan import Plan
from stpart_compiler.local_ranks import RanksFailedError, launch, train_on_ranks
from stpart_compiler.passes.emit_fx import annotated_code
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.templates import templates
from stpart_compiler.presets import PRESETS, TrainingStep, load_step
from stpart_compiler.progress import progress_lines
from stpart_compiler.runtime.calibrate import calibrate_here

CALIBRATE_LIMIT_S = 600.0

BAD_INPUT = 2
FAILED = 1

_NAMED_AXIS = re.compile(r"([A-Za-z_]\w*)=(\d+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0 done, 1 failed while running, 2 bad input (one line on standard error says what)."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.command(options)
    except (ValueError, OSError) as error:
        return _complain(error, BAD_INPUT)
    except RanksFailedError as error:
        return _complain(error, FAILED)
    return status


def _complain(error: Exception, status: int) -> int:
    print(f"stpart: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stpart", description="Partition a training step over ranks, in space and time."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("demo", help="train a small Llama on 4 local ranks, beside one device")
    command.set_defaults(command=lambda options: demo())

    command = commands.add_parser("doctor", help="say what would be replicated or refused, before any run")
    _model_arguments(command)
    command.set_defaults(command=_doctor)

    command = _model_command(commands, "plan", "choose a plan, print it and what it costs", _plan)
    command.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the plan as JSON")
    command.add_argument("--verbose", action="store_true", help="list ops that cost nothing too")
    command.add_argument(
        "--yardsticks",
        action="store_true",
        help="price the best plan without temporal maps too, and templates on all splits over two axes",
    )

    command = commands.add_parser("diff", help="what differs between two plans of one step")
    for name in ("a", "b"):
        command.add_argument(name, metavar=f"{name.upper()}.json", type=Path, help="a plan that `stpart plan -o` wrote")
    command.add_argument("--verbose", action="store_true", help="list ops that cost nothing too")
    command.set_defaults(command=_diff)

    command = _model_command(commands, "dump", "look at the partitioned step", _dump)
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", action="store_true", help="the annotated joint graph, one value a line")
    what.add_argument("--dot", action="store_true", help="the annotated joint graph as DOT")
    what.add_argument("--rank", type=int, metavar="N", help="the Python of one rank's program")
    what.add_argument("--dir", type=Path, metavar="DIR", help="what every pass made, as numbered files")
    command.add_argument("--phase", choices=("forward", "backward"), default="forward", help="with --rank")

    command = _model_command(commands, "simulate", "time a step of all ranks' programs on a cluster", _simulate)
    command.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline as JSON for ui.perfetto.dev")

    command = _model_command(commands, "run", "train on local ranks with random data", _run)
    command.add_argument("--steps", type=_positive, default=5, metavar="N", help="AdamW steps (default 5)")
    command.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 1e-3)")
    command.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for the whole run")

    command = commands.add_parser(
        "calibrate", help="measure this machine or torchrun job: a cluster file for --cluster"
    )
    command.add_argument("output", type=Path, metavar="FILE", help="where to write the TOML")
    command.add_argument("--ranks", type=_positive, default=4, metavar="N", help="local ranks to start (default 4)")
    command.set_defaults(command=_calibrate)
    return parser


def _model_command(commands: Any, name: str, summary: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=f"{summary}.")
    _model_arguments(command)
    command.add_argument("--mesh", required=True, help="4, 2x2 or r=2,c=2")
    command.add_argument("--memory-limit", metavar="SIZE", help="per rank, such as 16GiB")
    command.add_argument("--template", metavar="NAME", help=f"take this named plan: {', '.join(templates())}")
    command.add_argument("--cluster", metavar="NAME", help="preset or path of a TOML: what is priced")
    command.set_defaults(command=run)
    return command


def _model_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=f"{', '.join(PRESETS)}, or path/to/file.py:function")
    command.add_argument("--batch", type=_positive, metavar="N", help="sequences in the global batch")
    command.add_argument("--seq", type=_positive, metavar="N", help="tokens in a sequence")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_positive.__name__ = "positive number"  # argparse names the type in its message


def parse_mesh_text(text: str) -> int | tuple[int, ...] | dict[str, int]:
    """`4`, `2x2` or `r=2,c=2` as `compile_model` takes it.

    Raises:
        ValueError: of another form.
    """
    if text.isdigit():
        return int(text)
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(int(size) for size in text.split("x"))
    named = [_NAMED_AXIS.fullmatch(part.strip()) for part in text.split(",")]
    if not all(named):
        raise ValueError(f"mesh: {text!r} cannot be read; expected 4, 2x2 or r=2,c=2")
    pairs = [(match[1], int(match[2])) for match in named if match]
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError(f"mesh: {text!r} names an axis twice; expected as in r=2,c=2")
    return dict(pairs)


def _compile(
    options: argparse.Namespace, step: TrainingStep, dump_dir: Path | None = None, solver: SolverOptions | None = None
) -> CompiledModel:
    with progress_lines() as say:
        return compile_model(
            step.model,
            step.args,
            step.kwargs,
            mesh=parse_mesh_text(options.mesh),
            memory_limit=options.memory_limit,
            cluster=options.cluster,
            template=options.template,
            loss_fn=step.loss_fn,
            solver=solver,
            dump_dir=dump_dir,
            progress=say,
        )


def _planned(
    options: argparse.Namespace, dump_dir: Path | None = None, solver: SolverOptions | None = None
) -> CompiledModel:
    """Compiled for planning: the named models hold no values then."""
    return _compile(options, load_step(options.model, options.batch, options.seq, device="meta"), dump_dir, solver)


def _doctor(options: argparse.Namespace) -> int:
    step = load_step(options.model, options.batch, options.seq, device="meta")
    graph = annotate(capture(step.model, step.args, dict(step.kwargs), loss_fn=step.loss_fn))
    print(diagnose(graph))
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.output is not None:
        _check_writable(options.output)
    if options.yardsticks and options.template:
        raise ValueError("--yardsticks: only where the plan is solved for; leave --template out")
    plan = _planned(options, solver=SolverOptions(spatial_only=options.yardsticks)).plan
    print(plan.summary())
    print()
    print(plan_table(plan, options.verbose))
    if options.output is not None:
        options.output.write_text(plan.to_json())
        print(f"written to {options.output}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    plans = []
    for path in (options.a, options.b):
        try:
            plans.append(Plan.from_json(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    print(diff(*plans).text(options.verbose), end="")
    return 0


def _check_writable(path: Path) -> None:
    """Fail before the work rather than after it. Raises OSError."""
    is_new = not path.exists()
    with path.open("a"):
        pass
    if is_new:
        path.unlink()


def _dump(options: argparse.Namespace) -> int:
    compiled = _planned(options, options.dir)
    if options.text:
        print(compiled.dump(), end="")
    elif options.dot:
        print(compiled.dot(), end="")
    elif options.rank is not None:
        programs = compiled.program(options.rank)
        module = programs.forward if options.phase == "forward" else programs.backward
        if module is None:
            raise ValueError("--phase backward: the step has no backward, since its output has no gradient")
        print(annotated_code(module))
    else:
        (options.dir / "05_annotated.txt").write_text(compiled.dump())
        print(f"written to {options.dir}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    if options.trace is not None:
        _check_writable(options.trace)
    compiled = _planned(options)
    simulation = compiled.simulate()
    print(compiled.plan.summary())
    print(simulation.summary())
    if options.trace is not None:
        simulation.trace(options.trace)
        print(f"written to {options.trace}; open it at ui.perfetto.dev")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    """In place under torchrun, else on local ranks."""
    _check_writable(options.output)
    if "RANK" in os.environ:
        calibrate_here(options.output)
    else:
        launch(options.ranks, "stpart_compiler.runtime.calibrate", str(options.output), CALIBRATE_LIMIT_S)
    if int(os.environ.get("RANK", 0)) == 0:
        cluster = load_cluster(options.output)
        print(f"cluster {cluster.name!r} written to {options.output}: use it as --cluster {options.output}")
    return 0


def _run(options: argparse.Namespace) -> int:
    step = load_step(options.model, options.batch, options.seq)
    compiled = _compile(options, step)
    print(compiled.plan.summary())
    batch = (step.args, dict(step.kwargs))
    train_on_ranks(compiled, [batch] * options.steps, learning_rate=options.lr, limit_s=options.timeout)
    return 0
