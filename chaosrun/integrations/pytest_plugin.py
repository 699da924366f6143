"""What pytest sees of chaosrun: options, marks, the header, the fixture `chaos`. Loaded into every pytest session of an
environment: chaosrun itself is imported only where its fixture, a mark or an option of it is used.

Must not know how a drill is run or judged: that is `chaosrun.integrations.testing`.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from chaosrun.integrations.testing import Chaos, OneRay

MARKS = (
    "chaos(seeds): run the test once for each seed of the fault plan; it takes the fixture `chaos`",
    "chaos_plans(*plans, ids=None): run the test once for each plan of faults (a preset, or as in a job file's faults)",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaosrun", "drills (chaosrun)")
    group.addoption(
        "--chaos-seed",
        metavar="N|today",
        type=_seed,
        help="seed of the fault plans of all drills that do not set their own; today: the date (UTC) as seed.",
    )
    group.addoption("--chaos-root", metavar="DIR", help="where runs are (default: $CHAOSRUN_ROOT, else ROOTDIR/.chaosrun).")
    group.addoption("--chaos-address", metavar="ADDRESS", help="Ray cluster to join (default: start a local Ray).")


def _seed(text: str) -> int:
    from argparse import ArgumentTypeError

    from chaosrun.campaign.suite_plan import parse_seed
    from chaosrun.errors import UsageError

    try:
        return parse_seed(text, time.time())
    except UsageError as error:
        raise ArgumentTypeError(f"{text!r} is not a seed: {error.hint}") from error


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("chaos_seed")
    return None if seed is None else f"chaosrun: --chaos-seed {seed}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plans, seeds = metafunc.definition.get_closest_marker("chaos_plans"), metafunc.definition.get_closest_marker("chaos")
    if plans is None and seeds is None:
        return
    from chaosrun.integrations.testing import cases

    found = cases(plans, seeds, where=metafunc.definition.nodeid)
    if "chaos" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: its mark makes drills, so it must take the fixture `chaos`")
    metafunc.parametrize("chaos", [plan for _, plan in found], ids=[name for name, _ in found], indirect=True)


@pytest.fixture(scope="session")
def _chaos_ray(pytestconfig: pytest.Config) -> "Iterator[OneRay]":
    from chaosrun.integrations.testing import OneRay

    ray = OneRay(pytestconfig.getoption("chaos_address"))
    yield ray
    ray.close()


@pytest.fixture
def chaos(request: pytest.FixtureRequest, _chaos_ray: "OneRay") -> "Iterator[Chaos]":
    """Run drills: `chaos.run("job.yaml", faults=…, seed=3, workers=4, overrides=[…]).assert_exact()`, and without a job file
    `chaos.run_script("train.py", "--epochs", "3", workers=3, kills=["1@65"])`, `chaos.run_command(["torchrun", …], kills=…)`.

    A drill that is not PASS, and whose verdict the test never asserts, is an error at the end of the test.
    """
    from chaosrun.integrations.testing import Chaos, Plan

    chaos = Chaos(request, _chaos_ray, getattr(request, "param", Plan()))
    yield chaos
    if unseen := chaos.unseen():
        pytest.fail("\n\n".join(unseen), pytrace=False)
