"""Everything that a script can reach beside its checkpoint is looked at: a change at any of many places is seen, or refused."""

import json
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from own_places import PLACES

from chaosrun.observe import own

HERE = Path(__file__).parent
PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import own_places
from chaosrun.observe.own import own_state
changes = {{name: make() for name, make in own_places.PLACES.items()}}
told, states = {{}}, [own_state(own_places.state, own_places.before)]
for name, change in changes.items():
    change()
    states.append(own_state(own_places.state, own_places.before))
    told[name] = states[-2:]
print("TOLD", json.dumps(told))
"""
REFUSED = {
    "data in a pipe": "data that wait in a pipe",
    "file in memory": "a file in memory",
    "suspended coroutine": "coroutine",
    "frozen garbage": "objects hidden by gc.freeze()",
}


@pytest.fixture(scope="module")
def told() -> dict[str, list[tuple[str, list[str]]]]:
    """Before each change and after it. A process of its own: here, everything of the tests is of the script."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=HERE)
    return json.loads(done.stdout.partition("TOLD ")[2])


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen_or_refused(told: dict[str, list[tuple[str, list[str]]]], place: str) -> None:
    before, after = told[place]
    assert before[1] == [] or place in REFUSED, "what is refused stays so"
    if place in REFUSED:
        assert any(REFUSED[place] in name for name in after[1]), after
    else:
        # What nobody changes stays equal, at first and after all changes.
        assert (after[0] != before[0], after[1]) == (not place.startswith("nothing"), [])


def test_what_is_hidden_has_one_digest_however_the_garbage_collector_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = enumerate([1, 2, 3])
    outer = enumerate(inner)
    digests: set[str] = set()
    monkeypatch.setattr(own, "_of_the_script", iter)
    for listed in ([inner, outer], [outer, inner]):
        look = own._Look({})
        look.at_hidden(listed)
        digests.add(look.digest())
    assert len(digests) == 1


def test_objects_that_are_hidden_are_put_in_order_within_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them leads to all the others: looking at all from each would take for ever."""
    ring = [{"next": None} for _ in range(200)]
    for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
        one["next"] = other  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(own, "MOST_OBJECTS", 1000)
    monkeypatch.setattr(own, "_of_the_script", iter)
    look = own._Look({})
    look.at_hidden(ring)
    assert look._reached[1] <= 1000 + len(ring) and not look.unseen


def test_modules_that_a_library_makes_are_no_name_space_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnx's binding does, without a file or a spec: no verdict was ever early beside it."""
    for name, file in {
        "a_library": pytest.__file__,
        "a_library.core": None,
        "a_library.core.checker": None,
        "mine": None,
    }.items():
        module = types.ModuleType(name)
        module.__file__, module.level = file, 1  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    found = [
        name
        for name, _ in own._of_modules_made_by_hand(sys.modules.keys() - {"a_library.core", "a_library.core.checker", "mine"})
    ]
    assert found == ["mine:level"]


def test_variables_that_a_library_gains_are_new_and_none_can_be_told_once_it_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("a_library")
    monkeypatch.setitem(sys.modules, "a_library", library)
    monkeypatch.setattr(library, "first", 1, raising=False)
    monkeypatch.setattr(library, "last", 2, raising=False)
    before = own.Surroundings.now().variables
    monkeypatch.setattr(library, "level", 3, raising=False)
    assert list(own._since("a_library", before)) == [("level", 3)]
    monkeypatch.delattr(library, "last")
    setattr(library, "last", 2)  # noqa: B010  the newest again
    with pytest.raises(LookupError, match="a_library"):
        list(own._since("a_library", before))


def test_what_python_keeps_of_the_warnings_of_a_script_is_none_of_its_variables(tmp_path: Path) -> None:
    """It counts how often any library changed the filters: no leg ever ended early once a line of the script had warned."""
    (script := tmp_path / "train.py").touch()
    prepared = dict.fromkeys(("_models", "_optimizers", "_schedulers", "_dataloaders"), ())
    space = {"look": own._roots, "training": types.SimpleNamespace(**prepared), "__warningregistry__": {"version": 7}}
    exec(compile("found = dict(look(training))", script, "exec"), space)
    assert {"1:<module>.look", "1:<module>.training"} == {name for name in space["found"] if name.startswith("1:<module>")}


def test_what_a_function_drops_after_a_look_is_not_kept_alive(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    prepared = dict.fromkeys(("_models", "_optimizers", "_schedulers", "_dataloaders"), ())
    space = {"look": own._roots, "training": types.SimpleNamespace(**prepared), "weakref": weakref, "made": [torch.zeros(3)]}
    source = """
def loop(loaded):
    seen, names = weakref.ref(loaded), [name for name, _ in look(training)]
    del loaded
    return seen(), names
kept, names = loop(made.pop())
"""
    exec(compile(source, script, "exec"), space)
    assert any(name.endswith(":loop.loaded") for name in space["names"])
    assert space["kept"] is None


def test_code_that_is_compiled_again_is_refused() -> None:
    """Which version runs depends on the inputs that came before: after a restart, others did."""
    torch._dynamo.reset()  # another test may have compiled something
    quick = torch.compile(torch.nn.functional.leaky_relu, backend="eager")
    training: Any = types.SimpleNamespace(_dataloaders=[])
    try:
        told = []
        for slope in (0.1, 0.1, 0.2):
            quick(torch.ones(2), slope)
            told.append([each for each in own._elsewhere(training) if "compile" in each])
        assert told == [[], [], ["code that torch.compile has compiled more than once"]]
    finally:
        torch._dynamo.reset()
