"""Whether a script goes by the order of hashes, as its text shows: then each new Python process has it another way.

Python hashes texts with a seed of each process's own. What a set of them is gone through for, such as the numbers of labels, is
not what it was before a restart. Nothing is imported or executed.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from chaosrun.spec.launch import syntax_tree

ORDERED = frozenset({"list", "tuple", "enumerate", "iter", "zip", "map", "filter", "join", "fromkeys", "array", "tensor"})
"""Functions that keep the order of what they are given."""
MOST_FILES = 100


@cache
def goes_by_hashes(script: Path) -> bool:
    """In the script, or in a module of its own folder that it imports."""
    waiting, met = [script], {script}
    while waiting and len(met) < MOST_FILES:
        try:
            tree = syntax_tree(waiting.pop().read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        if _has_hash_order(tree):
            return True
        beside = {file for name in _imported(tree) for file in _files(script.parent, name)} - met
        met |= beside
        waiting += sorted(beside)
    return False


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (module, *(f"{module}.{alias.name}".strip(".") for alias in node.names))


def _files(folder: Path, module: str) -> list[Path]:
    path = folder.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if module and file.is_file()]


def _has_hash_order(tree: ast.Module) -> bool:
    sets: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_set(node.value, sets):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            sets.update(map(ast.unparse, targets))
    return any(_goes_through(node, sets) for node in ast.walk(tree))


def _is_set(node: ast.expr, sets: set[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="set" | "frozenset")) | ast.SetComp():
            return True
        case ast.Set():
            return not all(isinstance(item, ast.Constant) and isinstance(item.value, int | float) for item in node.elts)
        case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
            return _is_set(node.left, sets) or _is_set(node.right, sets)
        case ast.Name() | ast.Attribute():
            return ast.unparse(node) in sets
        case _:
            return False


def _goes_through(node: ast.AST, sets: set[str]) -> bool:
    """In the order of hashes, or takes one of them. A set that is sorted, counted or made of another is let be."""
    match node:
        case ast.For():
            return _is_set(node.iter, sets)
        case ast.ListComp() | ast.DictComp():
            return any(_is_set(part.iter, sets) for part in node.generators)
        case ast.Starred():
            return _is_set(node.value, sets)
        case ast.Call(func=ast.Name(id="hash")):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            popped = name == "pop" and isinstance(node.func, ast.Attribute) and _is_set(node.func.value, sets)
            return popped or (name in ORDERED and any(_is_set(argument, sets) for argument in node.args))
        case _:
            return False
