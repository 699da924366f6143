"""The page of all messages is what the source says today."""

from tests.docs.messages import PAGE, messages, page


def test_the_page_holds_them_all() -> None:
    assert PAGE.read_text() == page(), "python -m tests.docs.messages writes it anew"


def test_a_message_is_found_with_its_hint() -> None:
    source = 'raise UsageError(f"no run {name}" if name else "the name is empty", hint=f"`{shown}` shows them")'
    assert list(messages(source)) == [("no run … / the name is empty", "`…` shows them")]


def test_what_nobody_reads_is_none() -> None:
    assert not list(messages('digest("two words"); raise KeyError(name); tell("suite.anew", name="a name")'))
