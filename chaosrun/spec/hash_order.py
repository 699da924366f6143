"""Finds in a script's source where it depends on hashes or on the order of a set: that order differs in each new Python
process, which hashes strings with its own seed. Values derived by iterating over a set of strings, such as label numbers, then
change at a restart. Nothing is imported or executed.
"""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

from chaosrun.spec.launch import syntax_tree

ORDERED = frozenset({"list", "tuple", "enumerate", "iter", "zip", "map", "filter", "join", "fromkeys", "array", "tensor"})
"""Functions whose result keeps the order of their argument."""
UNORDERED = frozenset({"sorted", "set", "frozenset", "len", "any", "all", "max", "min", "update", "union"})
"""Functions whose result does not depend on that order."""
COMBINING = frozenset({"union", "intersection", "difference", "symmetric_difference", "copy"})
VIEWS = frozenset({"keys", "items"})
MOST_FILES = 100


@cache
def hash_order(script: Path) -> str:
    """The first place (`file:line`, from the script's folder) where the script, or a module of its own folder that it imports,
    depends on hashes; empty where it does not."""
    waiting, met = [script], {script}
    while waiting and len(met) < MOST_FILES:
        try:
            file = waiting.pop()
            tree = syntax_tree(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        if lines := _lines(tree):
            return f"{file.relative_to(script.parent)}:{min(lines)}"
        beside = {file for name in _imported(tree) for file in _files(script.parent, name)} - met
        met |= beside
        waiting += sorted(beside)
    return ""


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


def _lines(tree: ast.Module) -> list[int]:
    """Lines where the order of a set, or a hash, matters."""
    sets = _Sets()
    nodes = list(ast.walk(tree))
    for node in nodes:
        sets.learn(node)
    unordered = {id(argument) for node in nodes if _is_called(node, UNORDERED) for argument in node.args}
    unordered |= {id(value) for node in nodes for value in _sorted_next(node)}
    return [_line(node) for node in nodes if id(node) not in unordered and _goes_through(node, sets)]


def _line(node: ast.AST) -> int:
    return node.lineno if isinstance(node, ast.expr | ast.stmt) else 1


def _sorted_next(node: ast.AST) -> Iterator[ast.expr]:
    """Lists that the next statement sorts in place: `names = list(found); names.sort()`."""
    for block in (getattr(node, part, None) for part in ("body", "orelse", "finalbody")):
        for one, other in pairwise(block) if isinstance(block, list) else ():
            match one, other:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value),
                    ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=sorts), attr="sort"), keywords=keywords)),
                ) if name == sorts and not any(word.arg == "key" for word in keywords):
                    yield value


class _Sets:
    """Which expressions are sets, as far as the source shows; variables and functions by name."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._functions: set[str] = set()

    def learn(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(value=value, targets=targets) if value in self:
                self._names.update(map(ast.unparse, targets))
            case ast.AnnAssign(value=ast.expr() as value, target=target) if value in self:
                self._names.add(ast.unparse(target))
            case ast.FunctionDef(name=name):
                returned = (part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value)
                self._functions |= {name} if any(value in self for value in returned) else set()

    def __contains__(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name in ("set", "frozenset") or name in self._functions
            case ast.Call(func=ast.Attribute(attr=name, value=value)):
                return (name in COMBINING and value in self) or name in self._functions
            case ast.SetComp():
                return True
            case ast.Set():
                return not all(isinstance(item, ast.Constant) and isinstance(item.value, int | float) for item in node.elts)
            case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
                return any(side in self or _is_called(side, VIEWS) for side in (node.left, node.right))
            case ast.Name() | ast.Attribute():
                return ast.unparse(node) in self._names
            case _:
                return False


def _is_called(node: ast.AST, names: frozenset[str]) -> TypeGuard[ast.Call]:
    """A call of one of these functions without `key`: with a key, the first of equal elements would depend on the order."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords):
            return name in names and not any(word.arg == "key" for word in keywords)
        case _:
            return False


def _goes_through(node: ast.AST, sets: _Sets) -> bool:
    """Whether the node iterates over a set, or calls hash(). Sorting or counting a set, or making one from another, does not
    count."""
    match node:
        case ast.Name(id="hash", ctx=ast.Load()):
            return True
        case ast.For():
            return node.iter in sets
        case ast.ListComp() | ast.DictComp() | ast.GeneratorExp():
            return any(part.iter in sets for part in node.generators)
        case ast.Starred():
            return node.value in sets
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            popped = name == "pop" and isinstance(node.func, ast.Attribute) and node.func.value in sets
            chosen = name in ("max", "min", "sorted") and not _is_called(node, UNORDERED)
            return popped or ((name in ORDERED or chosen) and any(argument in sets for argument in node.args))
        case _:
            return False
