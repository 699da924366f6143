"""Every page holds what its readers rely on: links lead somewhere, files load, code compiles, names exist."""

import ast
import re
from pathlib import Path

import pytest

import chaosrun
from chaosrun.integrations.testing import Chaos
from chaosrun.protocol.session import Session
from chaosrun.spec.job_file import load_job
from chaosrun.spec.places import SourceText
from chaosrun.spec.suite import load_suite
from chaosrun.spec.tree import Mapping, plain, read_tree
from tests.docs.pages import PAGES, ROOT, Block, anchors, blocks, links, prose, spans
from tests.unit.test_export import valid_workflows

LANGUAGES = {"sh", "yaml", "python", "text"}
LEAST_JOB = "name: least\nscript: train.py\nworkers: 3\nmax_steps: 200\n"
TEST = re.compile(r"`((?:unit|integration|e2e|oracle)/[\w/]+\.py)((?:::\w+)+)`")
CLAIM = re.compile(r"\]\(hazards\.md#\w+\)")
ROOMS = {path.stem for path in (ROOT / "chaosrun").glob("[a-z]*") if path.suffix in ("", ".py") and path.stem != "py"}
PATHS = re.compile(r"\b(?:jobs|configs|docs|tests|chaosrun)/[\w./-]+\w\b")
LONGEST_README = 400
HEAVIEST_PICTURE = 250_000

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def test_the_rules_see_the_pages(tmp_path: Path) -> None:
    # Without this, an expression that finds nothing would pass every rule below.
    assert sum(len(links(page)) for page in PAGES) > 80 and sum(len(spans(page)) for page in PAGES) > 500
    page = tmp_path / "page.md"
    page.write_text("# A `b` c.d\n\n[x](y.md#z) and `chaosrun\nlist`.\n\n```sh\n[no](link) `no span`\n```\n")
    assert (links(page), spans(page), anchors(page)) == (["y.md#z"], ["b", "chaosrun list"], {"a-b-cd"})
    assert [(block.language, block.line) for block in blocks(page)] == [("sh", 6)]


@pages
def test_every_block_says_what_it_is(page: Path) -> None:
    assert [str(block) for block in blocks(page) if block.language not in LANGUAGES] == []
    assert "```" not in prose(page)
    indented = re.findall(r"^    \S.*", prose(page), re.MULTILINE)
    assert not indented, "a block without a fence is tested by nobody"


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_every_test_and_file_that_is_named_exists(page: Path) -> None:
    for path, parts in TEST.findall(page.read_text()):
        source = (ROOT / "tests" / path).read_text()
        for part in parts.strip(":").split("::"):
            assert re.search(rf"^\s*(?:class|def) {part}\b", source, re.MULTILINE), f"{path}{parts}"
    for span in spans(page):
        for path in PATHS.findall(span) if span.startswith(("jobs/", "configs/", "docs/", "tests/", "chaosrun/")) else ():
            assert (ROOT / path).exists(), path


@pages
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {span.split()[1] for span in spans(page) if re.match(r"make [a-z]+", span)}
    assert named <= targets


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_yaml_loads(block: Block, tmp_path: Path) -> None:
    """A suite, a job, a part of a job, or a workflow of GitHub Actions."""
    root, problems = read_tree(SourceText(label=str(block), text=block.text))
    assert isinstance(root, Mapping) and not problems
    keys = plain(root).keys()
    folder = tmp_path / "configs"
    for name in ("configs", "jobs"):
        (tmp_path / name).symlink_to(ROOT / name) if name == "jobs" else folder.mkdir()
    (folder / "train.py").write_text("from chaosrun import attach\n")
    path = folder / "file.yaml"
    if "jobs" in keys:
        path.write_text(block.text)
        assert valid_workflows(path) == ""
    elif "drills" in keys:
        path.write_text(block.text)
        assert len(load_suite(path).drills) > 1
    else:
        path.write_text(block.text if {"script", "command"} & keys else LEAST_JOB + block.text)
        assert load_job(path).spec.workers == 3


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_python_compiles_and_its_names_exist(block: Block) -> None:
    homes = {"chaosrun": chaosrun.__all__, "run": dir(Session), "chaos": dir(Chaos)}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in homes:
            assert node.attr in homes[node.value.id], ast.unparse(node)


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"^\| (`[^|]+`) \| [^|]+ \|$", text[text.index("| package |") : text.index("## The state machine")], re.MULTILINE
    )
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == ROOMS - {"__init__", "__pycache__"}
    page = text[: text.index("## Two exercises")]
    assert len(page.splitlines()) < 160, "the map, the walks and the glossary; no more"


def test_twenty_questions_lead_to_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    answers = re.findall(r"\?(?: \(.*\))? \| (.+) \|$", text[text.index("## Twenty questions") :], re.MULTILINE)
    files = [path for answer in answers for path in re.findall(r"`(\w+/[\w/]+\.py)`", answer)]
    assert len(answers) == 20 <= len(files)
    assert [path for path in files if not (ROOT / "chaosrun" / path).is_file()] == []


def test_the_map_has_the_phases_of_a_leg() -> None:
    from chaosrun.supervise.lifecycle import Phase

    text = (ROOT / "docs" / "architecture.md").read_text()
    for phase in Phase.__args__:
        assert re.search(rf"\b{phase}\b", text), phase


def test_every_claim_of_exactness_is_shown() -> None:
    """Each paragraph and entry of the protocol names a row of the hazards or a test."""
    text = prose(ROOT / "docs" / "exactness.md")
    told = re.split(r"\n\n|\n(?=- |\d\. )", text[text.index("## The resume protocol") :])
    claims = [part for part in told if len(part.split()) > 25 and not part.startswith("Every attempt, the reference's")]
    assert len(claims) > 15
    assert [part for part in claims if not (CLAIM.search(part) or TEST.search(part))] == []


def test_the_readme_is_what_one_reads_in_ten_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README
    assert 0 < (ROOT / "docs" / "report.png").stat().st_size <= HEAVIEST_PICTURE


def test_the_version_has_an_entry_in_the_changelog() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(chaosrun.__version__)}\] - 20\d\d-\d\d-\d\d$", changes, re.MULTILINE)


def test_the_readme_leads_to_every_page() -> None:
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= {link.partition("#")[0] for link in links(PAGES[0])}
