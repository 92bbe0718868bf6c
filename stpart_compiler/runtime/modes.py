"""Train and eval mode of a rank module: its programs are those of the modes that the model was traced in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn

Mode = tuple[str, nn.Module, bool]
"""Name of a module in the model, its counterpart in the rank module, and whether it was traced in train mode."""


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at `path` below `root`, made where it is missing.

    Straight in the tables: the checks of add_module refuse names that are attributes of the root itself.
    """
    module = root
    for part in path.split(".") if path else ():
        child = module._modules.setdefault(part, nn.Module())
        assert child is not None
        module = child
    return module


def take_modes(root: nn.Module, modes: Mapping[str, bool]) -> list[Mode]:
    """Put `root` and the modules below it, a counterpart for each of the model, in the modes of the trace.

    The root itself is not listed: what holds the list may be held by it.
    """
    found = []
    for name, mode in modes.items():
        module = submodule(root, name)
        module.training = mode
        if name:
            found.append((name, module, mode))
    return found


@contextlib.contextmanager
def in_modes(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """Within: the modules of `model` are in these modes. After: as before."""
    modules = dict(model.named_modules(remove_duplicate=False))
    before = {name: module.training for name, module in modules.items()}
    try:
        for name in modules.keys() & modes.keys():
            modules[name].training = modes[name]
        yield
    finally:
        for name, mode in before.items():
            modules[name].training = mode


def check_modes(root: nn.Module, modes: list[Mode], traced: bool) -> None:
    """`traced`: whether the model itself was traced in train mode.

    Raises:
        ValueError: a module is in another mode than the one it was traced in; names it.
    """
    if root.training != traced:
        raise _other_mode("the model", traced)
    for name, module, mode in modes:
        if module.training != mode:
            raise _other_mode(f"module {name!r}", mode)


def _other_mode(what: str, traced: bool) -> ValueError:
    compiled, now = ("train", "eval") if traced else ("eval", "train")
    return ValueError(
        f"rank module: compiled with {what} in {compiled} mode, but called in {now} mode, which its programs do not"
        f" know: call .{compiled}() to go on, or compile a second module from the model in {now} mode, and carry the"
        " parameters over with save_checkpoint and load_checkpoint"
    )
