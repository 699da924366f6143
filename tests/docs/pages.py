"""What the documents hold: their blocks, the lines that are to be typed, code within sentences, links and headings."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(```+)(\w*)\n(.*?)^\1\n", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"\s+#\s(?P<words>.*)$")
EXIT_CODE = re.compile(r"\bexit code (\d+)\b")
SEPARATORS = {"&&", "||", "|", ";", "&"}
REDIRECTIONS = {">", ">>", "<", "2>"}
TABLE_OF_COMMANDS = re.compile(r"<!-- commands: begin -->.*?<!-- commands: end -->", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    """Of its fence."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that is to be typed."""

    block: Block
    text: str
    """Without its comment."""
    exit_code: int = 0
    """What its comment says, else 0."""

    def __str__(self) -> str:
        return f"{self.block}: {self.text}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page=page, line=text.count("\n", 0, found.start()) + 1, language=found[2], text=found[3])
        for found in FENCE.finditer(text)
    ]


def typed(page: Path) -> list[Line]:
    """Every line of the page's sh blocks, in order."""
    return [line for block in blocks(page) if block.language == "sh" for line in lines(block)]


def lines(block: Block) -> Iterator[Line]:
    for text in block.text.replace("\\\n", " ").splitlines():
        comment = COMMENT.search(text)
        code = EXIT_CODE.search(comment["words"]) if comment else None
        if typed_text := COMMENT.sub("", text).strip():
            yield Line(block=block, text=typed_text, exit_code=int(code[1]) if code else 0)


def commands(text: str) -> list[list[str]]:
    """The simple commands of a line, each a list of words, without what is redirected."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in SEPARATORS:
            found.append([])
        elif word in REDIRECTIONS:
            next(words, None)
        else:
            found[-1].append(word)
    return [command for command in found if command]


def prose(page: Path) -> str:
    """The page without its blocks and without the table of commands, which has a test of its own."""
    return TABLE_OF_COMMANDS.sub("", FENCE.sub("", page.read_text()))


def spans(page: Path) -> list[str]:
    """Code within sentences."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose(page))]


def links(page: Path) -> list[str]:
    """Where it points to, but for the web."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """What a link into the page may name: headings, as GitHub spells them, and anchors of its own."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    spelt = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return spelt | set(re.findall(r'<a id="(\w+)">', text))
