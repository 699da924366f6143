"""The variables that a script's training loop sets anew in each step, according to its source."""

import ast
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaosrun.observe.script_state import is_own

LOOPS = ("batches", "windows")


@dataclass(frozen=True, slots=True)
class _Use:
    name: str
    stores: bool
    branch: tuple[int, ...]
    """The conditional statements around it."""


def loop_variables(innermost: types.FrameType) -> set[str] | None:
    """Names that the script's training loop sets anew in each step; None when its source has no such loop."""
    for frame, _ in traceback.walk_stack(innermost):
        if is_own(frame.f_globals.get("__name__", "")):
            with suppress(OSError, SyntaxError, ValueError):  # not Python source
                if (names := set_in_each_round(ast.parse(Path(frame.f_code.co_filename).read_bytes()))) is not None:
                    return names
    return None


def set_in_each_round(tree: ast.Module) -> set[str] | None:
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and any(getattr(part, "attr", None) in LOOPS for part in ast.walk(node.iter))
    ]
    if not loops:
        return None
    names: set[str] = set()
    for loop in loops:
        uses = [*_uses(loop.target, ()), *(use for statement in loop.body for use in _uses(statement, ()))]
        outside = set(_read_outside(loop, tree))
        first: dict[str, _Use] = {}
        for use in uses:
            first.setdefault(use.name, use)
        for name, use in first.items():
            reads = [other for other in uses if other.name == name and not other.stores]
            covered = all(other.branch[: len(use.branch)] == use.branch for other in reads)
            # A variable set only conditionally, and read nowhere else in the loop, is kept for later.
            kept = use.branch and (name in outside or not reads)
            if use.stores and covered and not kept:
                names.add(name)
    return names


def _read_outside(loop: ast.For, node: ast.AST) -> Iterator[str]:
    """Names that are read outside the loop. In a function that does not contain the loop such a name is its own variable,
    except in its parameters' defaults."""
    own: set[str] = set()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and loop not in ast.walk(node):
        own = _own_names(node)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            yield from _read_outside(loop, default) if default else ()
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    if node is not loop:
        yield from (name for child in ast.iter_child_nodes(node) for name in _read_outside(loop, child) if name not in own)


def _own_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """The parameters and variables of a function, without those of nested functions."""
    own = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    shared: set[str] = set()
    waiting: list[ast.AST] = [*function.body] if isinstance(function.body, list) else [function.body]
    while waiting:
        match part := waiting.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                continue
            case ast.Global() | ast.Nonlocal():
                shared.update(part.names)
            case ast.Name(ctx=ast.Store()):
                own.add(part.id)
            case _:
                pass
        waiting.extend(ast.iter_child_nodes(part))
    return own - shared


def _uses(node: ast.AST, branch: tuple[int, ...]) -> Iterator[_Use]:
    """Uses of variables in order of evaluation."""
    match node:
        case ast.Name():
            yield _Use(node.id, isinstance(node.ctx, ast.Store), branch)
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                yield _Use(node.target.id, False, branch)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (use for part in (node.value, *targets) if part is not None for use in _uses(part, branch))
        case ast.If() | ast.While():
            yield from _uses(node.test, branch)
            for number, part in enumerate((node.body, node.orelse)):
                for statement in part:
                    yield from _uses(statement, (*branch, id(node) + number))
        case ast.For():
            yield from _uses(node.iter, branch)
            for part in (node.target, *node.body, *node.orelse):
                yield from _uses(part, (*branch, id(node)))
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            results = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
            yield from (use for part in (*node.generators, *results) for use in _uses(part, branch))
        case ast.comprehension():
            yield from (use for part in (node.iter, node.target, *node.ifs) for use in _uses(part, branch))
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _uses(child, branch)
