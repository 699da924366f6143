"""One audit hook serves all observers of a process, and no hot loop of ours raises an event for each object."""

from tests.unit.forked import printed

IMPORTS = """
import gc, sys
from chaosrun.observe.audit import listen
from chaosrun.observe.live_modules import digests_of_others

hooks, heard = [], []
sys.addaudithook(lambda event, arguments: hooks.append(event) if event == "sys.addaudithook" else None)
"""
LISTENS = """
listen(["one", "two"], lambda event, arguments: heard.append((1, event, arguments)))
listen(["two"], lambda event, arguments: heard.append((2, event, arguments)))

def refuse(event, arguments):
    raise PermissionError(event)

listen(["three"], refuse)
sys.audit("one", 3), sys.audit("two"), sys.audit("four")
try:
    sys.audit("three")
    heard.append("went on")
except PermissionError as error:
    heard.append(str(error))
print(len(hooks), heard)
"""
LOOKS = """
listen(["builtins.id"], lambda event, arguments: heard.append(event))
id(heard)
calls = len(heard)
digests_of_others([], [])
print(calls, len(heard) < len(gc.get_objects()) / 10)
"""


def test_listeners_hear_their_events_in_order_through_one_hook() -> None:
    heard = [(1, "one", (3,)), (1, "two", ()), (2, "two", ()), "three"]
    told = printed(IMPORTS, [LISTENS, LOOKS])
    assert told[LISTENS] == f"1 {heard}\n"
    # Python calls the hook once for each id().
    assert told[LOOKS] == "1 True\n"
