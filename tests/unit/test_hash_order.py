"""What of a script's text goes by the order of hashes."""

from pathlib import Path

import pytest

from chaosrun.spec.hash_order import goes_by_hashes


@pytest.mark.parametrize(
    "text",
    [
        "labels = list(set(names))",
        "for name in {'a', 'b'}:\n    print(name)",
        "found = set(names) | {'other'}\nnumbers = {name: n for n, name in enumerate(found)}",
        "class A:\n    def f(self):\n        self.words = {w for w in text}\n        return [*self.words]",
        "first = set(names).pop()",
        "shard = hash(name) % 8",
        "text = ','.join(frozenset(names))",
        "pairs = dict.fromkeys(set(names) - known)",
        "words = set(a).union(b)\nnumbers = {w: n for n, w in enumerate(words)}",
        "def vocabulary(text):\n    return set(text)\nfor word in vocabulary(text):\n    print(word)",
        "words = sorted(words, key=hash)",
        "labels = list(set(names))\nlabels.sort(key=len)",
        "labels = list(set(names))\nothers.sort()",
        "have = set(words)\nlabels = dict(zip((word for word in have), numbers))",
        "have = set(words)\nfirst = max(have, key=len)",
        "for name in mine.keys() & other.keys():\n    print(name)",
    ],
)
def test_it_does(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert goes_by_hashes(script)


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
    assert not goes_by_hashes(script)


def test_modules_beside_it_are_looked_at(tmp_path: Path) -> None:
    script, package = tmp_path / "train.py", tmp_path / "data"
    package.mkdir()
    script.write_text("import torch\nfrom data import labels")
    (package / "labels.py").write_text("import vocabulary")
    (tmp_path / "vocabulary.py").write_text("import train\nWORDS = tuple({word for word in TEXT})")
    assert goes_by_hashes(script)
    (tmp_path / "vocabulary.py").write_text("WORDS = sorted({word for word in TEXT})")
    goes_by_hashes.cache_clear()
    assert not goes_by_hashes(script)
