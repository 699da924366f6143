"""Where a script's text goes by the order of hashes."""

from pathlib import Path

import pytest

from chaosrun.spec.hash_order import hash_order


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("labels = list(set(names))", 1),
        ("for name in {'a', 'b'}:\n    print(name)", 1),
        ("found = set(names) | {'other'}\nnumbers = {name: n for n, name in enumerate(found)}", 2),
        ("class A:\n    def f(self):\n        self.words = {w for w in text}\n        return [*self.words]", 4),
        ("first = set(names).pop()", 1),
        ("shard = hash(name) % 8", 1),
        ("text = ','.join(frozenset(names))", 1),
        ("pairs = dict.fromkeys(set(names) - known)", 1),
        ("words = set(a).union(b)\nnumbers = {w: n for n, w in enumerate(words)}", 2),
        ("def vocabulary(text):\n    return set(text)\nfor word in vocabulary(text):\n    print(word)", 3),
        ("words = sorted(words, key=hash)", 1),
        ("labels = list(set(names))\nlabels.sort(key=len)", 1),
        ("labels = list(set(names))\nothers.sort()", 1),
        ("have = set(words)\nlabels = dict(zip((word for word in have), numbers))", 2),
        ("have = set(words)\nfirst = max(have, key=len)", 2),
        ("for name in mine.keys() & other.keys():\n    print(name)", 1),
    ],
)
def test_it_does(tmp_path: Path, text: str, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert hash_order(script) == f"train.py:{line}"


@pytest.mark.parametrize(
    "text",
    [
        "labels = sorted(set(names))",
        "known = set(names)\nfound = [name for name in listed if name in known]\nprint(len(known), max(known))",
        "for n in {1, 2}:\n    print(n)",
        "for name in ['a', 'b']:\n    names.pop()",
        "seed = hashlib.sha256(name).hexdigest()",
        "labels = sorted(x for x in set(names))",
        "def columns(values, known):\n    extra = list(values.keys() - known)\n    extra.sort()\n    return extra",
        "have = set(words)\nmost = max(have)\nif any(word in text for word in have):\n    print(len(have))",
        "def vocabulary(text):\n    return set(text)\nwords = sorted(vocabulary(text))",
        "for name in mine.keys():\n    print(name)",
        "not python",
    ],
)
def test_it_does_not(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert not hash_order(script)


def test_modules_beside_it_are_looked_at(tmp_path: Path) -> None:
    script, package = tmp_path / "train.py", tmp_path / "data"
    package.mkdir()
    script.write_text("import torch\nfrom data import labels")
    (package / "labels.py").write_text("import vocabulary")
    (tmp_path / "vocabulary.py").write_text("import train\nWORDS = tuple({word for word in TEXT})")
    assert hash_order(script) == "vocabulary.py:2"
    (tmp_path / "vocabulary.py").write_text("WORDS = sorted({word for word in TEXT})")
    hash_order.cache_clear()
    assert not hash_order(script)
