"""Who leaves when, with a real store: all ranks after the same step, however their steps interleave."""

import random
import signal
from pathlib import Path

import pytest
import torch

from chaosrun.errors import RecoveryError
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.protocol.preemption import Preemption
from tests.integration.ranks import make_orders
from tests.unit.forked import printed


@pytest.fixture(scope="module")
def server() -> torch.distributed.Store:
    return torch.distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(server: torch.distributed.Store, request: pytest.FixtureRequest) -> torch.distributed.Store:
    """One that no other test has written to."""
    return torch.distributed.PrefixStore(request.node.name, server)


def ranks(store: torch.distributed.Store, workers: int) -> list[Preemption]:
    found = [Preemption(order) for order in make_orders(Path("/nowhere"), "", workers=workers)]
    for preemption in found:
        preemption.use_store(store)
    return found


def tell(preemption: Preemption) -> None:
    preemption._hear(signal.SIGTERM, None)


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_leave_after_the_same_step(store: torch.distributed.Store, seed: int) -> None:
    chance = random.Random(seed)
    workers = chance.randint(2, 4)
    found = ranks(store, workers)
    told_at = {rank: chance.randint(1, 4) for rank in chance.sample(range(workers), chance.randint(1, workers))}
    left: dict[int, int] = {}
    # An all-reduce a step: nobody ends a step before everybody has begun it; within it any order.
    for step in range(1, 8):
        for rank in chance.sample(range(workers), workers):
            if told_at.get(rank) == step:
                tell(found[rank])
            if found[rank].due(step):
                left[rank] = step
        if left:
            break
    assert left == dict.fromkeys(range(workers), min(told_at.values()) + 1)


def test_nobody_leaves_untold(store: torch.distributed.Store) -> None:
    together = ranks(store, 2)
    assert not any(preemption.due(step) for step in range(1, 5) for preemption in together)


def test_of_ranks_that_are_told_at_once_each_says_so_of_itself(store: torch.distributed.Store) -> None:
    together = ranks(store, 3)
    for told in together[:2]:
        tell(told)
    assert not any(preemption.due(1) for preemption in together) and all(preemption.due(2) for preemption in together)
    for preemption in together:
        preemption.left = 2
    assert [preemption.end().told for preemption in together] == [0, 1, 0]


def test_one_rank_alone_leaves_at_once() -> None:
    (alone,) = (Preemption(order) for order in make_orders(Path("/nowhere"), "", workers=1))
    alone.use_store()
    assert not alone.due(1)
    tell(alone)
    assert alone.due(2)
    with pytest.raises(SystemExit) as left:
        alone.leave(2)
    assert left.value.code == PREEMPTED_EXIT_CODE
    end = alone.end()
    assert (end.status, end.exit_code, end.told, alone.left) == ("preempted", PREEMPTED_EXIT_CODE, 0, 2)
    assert end.error is not None and end.error.message.startswith("rank 0 was told to leave (SIGTERM) and left after step 2")


def test_ranks_that_do_not_keep_step_cannot_leave_together(store: torch.distributed.Store) -> None:
    behind, ahead = ranks(store, 2)
    assert not ahead.due(1) and not ahead.due(2) and not ahead.due(3)
    tell(behind)
    assert not behind.due(1)
    # Whoever is ahead cannot be called back.
    with pytest.raises(RecoveryError, match="rank 1 had done step 4 when rank 0, told to leave, announced the end of step 2"):
        ahead.due(4)


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What each of the programs below prints."""
    return printed("import chaosrun.protocol.preemption, chaosrun.protocol.rendezvous", (LISTENS, OVERHEARS, BY_NAME, HOSTS))


LISTENS = """\
import os, signal, time
from pathlib import Path
from chaosrun.protocol.preemption import Preemption
from tests.integration.ranks import make_orders
preemption = Preemption(make_orders(Path("/nowhere"), "", workers=1)[0])
preemption.listen()
child = os.fork()
if child == 0:
    time.sleep(300)
    os._exit(1)
os.kill(child, signal.SIGTERM)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
own = signal.signal(signal.SIGTERM, lambda *_: print("script's own"))
os.kill(os.getpid(), signal.SIGTERM)
print("told", preemption.due(1))
signal.signal(signal.SIGTERM, own)
os.kill(os.getpid(), signal.SIGTERM)
print("told", preemption.due(2))
"""


def test_sigterm_is_a_notice_for_the_rank_alone_unless_the_script_takes_it(told: dict[str, str]) -> None:
    assert told[LISTENS].splitlines() == ["child -15", "script's own", "told False", "told True"]


OVERHEARS = """\
import dataclasses, os, signal
from pathlib import Path
from chaosrun.protocol.preemption import Preemption
from tests.integration.ranks import make_orders

def own(number, frame):
    print("own", number)

before = signal.signal(signal.SIGTERM, own)
preemption = Preemption(make_orders(Path("/nowhere"), "", workers=1)[0])
preemption.record_handled_notices()
print(signal.getsignal(signal.SIGTERM) is own, signal.signal(signal.SIGTERM, lambda *_: print("another")) is own)
signal.signal(signal.SIGUSR1, own)
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.signal(signal.SIGTERM, signal.SIG_IGN) is not own, signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGTERM)
print("overheard", preemption.has_handled_notice)
signal.signal(signal.SIGTERM, own)
os.kill(os.getpid(), signal.SIGTERM)
print("overheard", preemption.has_handled_notice)
production = Preemption(dataclasses.replace(make_orders(Path("/nowhere"), "", workers=1)[0], leg="run"))
production.record_handled_notices()
os.kill(os.getpid(), signal.SIGUSR1)
print("overheard", production.has_handled_notice)
"""


BY_NAME = """\
import signal as module
from signal import SIG_BLOCK, SIGTERM, SIGUSR1, getsignal, pthread_sigmask, raise_signal, signal, sigwait
from pathlib import Path
from chaosrun.protocol.preemption import Preemption
from tests.integration.ranks import make_orders

def heard(act):
    preemption = Preemption(make_orders(Path("/nowhere"), "", workers=1)[0])
    preemption.record_handled_notices()
    act()
    return preemption.has_handled_notice

def handled():
    signal(SIGTERM, own)
    raise_signal(SIGTERM)
    assert getsignal(SIGTERM) is own

def awaited(wait, number):
    raise_signal(number)
    got = wait({number})
    assert getattr(got, "si_signo", got) == number

own = lambda *_: None
print("handler", heard(handled))
pthread_sigmask(SIG_BLOCK, {SIGTERM, SIGUSR1})
print("sigwait", heard(lambda: awaited(sigwait, SIGTERM)), heard(lambda: awaited(sigwait, SIGUSR1)))
print("info", heard(lambda: awaited(module.sigwaitinfo, SIGTERM)))
print("timed", heard(lambda: awaited(lambda signals: module.sigtimedwait(signals, 5), SIGTERM)))
"""


def test_a_notice_is_overheard_by_a_script_that_knows_the_functions_by_name_or_waits_for_it(told: dict[str, str]) -> None:
    """A command's process becomes a rank when its imports are done."""
    assert told[BY_NAME].splitlines() == ["handler True", "sigwait True False", "info True", "timed True"]


HOSTS = """\
import os, socket, sys
from pathlib import Path
from signal import SIGTERM
from chaosrun.protocol import rendezvous
from tests.integration.ranks import make_orders

before = set(os.listdir("/proc/self/task"))
listener = socket.create_server(("127.0.0.1", 0))
store = rendezvous.host_store(make_orders(Path("/nowhere"), "", workers=1)[0], listener.fileno())
started = set(os.listdir("/proc/self/task")) - before
masks = [Path(f"/proc/self/task/{each}/status").read_text().split("SigBlk:")[1].split()[0] for each in started]
print(len(masks) > 0, all(int(mask, 16) >> SIGTERM - 1 & 1 for mask in masks))
sys.stdout.flush()
os._exit(0)
"""


def test_the_rendezvous_store_takes_no_signal_that_a_script_blocks_to_wait_for(told: dict[str, str]) -> None:
    assert told[HOSTS].split() == ["True", "True"]


def test_a_notice_that_a_script_handles_itself_is_overheard(told: dict[str, str]) -> None:
    """Its handlers are called as before, and it finds them where it put them."""
    usr1, term = signal.SIGUSR1.value, signal.SIGTERM.value
    assert told[OVERHEARS].splitlines() == [
        *("True True", f"own {usr1}", "True True", "overheard False", f"own {term}", "overheard True"),
        *(f"own {usr1}", "overheard True"),
    ]
