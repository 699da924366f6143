"""What a script needs is read from its source; nothing of it runs."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest


def facts(script: Path) -> dict[str, Any]:
    """In a process of its own: it changes the path."""
    program = (
        "import sys; from msgspec import json; from chaosrun.preflight.probes.software import script_facts\n"
        "print(json.encode(script_facts(sys.argv[1], [])).decode())"
    )
    return json.loads(subprocess.run([sys.executable, "-c", program, str(script)], capture_output=True, check=True).stdout)


def test_imports_are_followed_through_what_lies_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (folder / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "outside.py").touch()
    (folder / "train.py").write_text(
        dedent("""
        import json, torch, not_installed.at_all
        from parts.model import Model
        import settings
        raise SystemExit("it was run")
        """)
    )
    (folder / "settings.py").write_text("try:\n    import fast_json\nexcept ImportError:\n    fast_json = None\n")
    (folder / "parts" / "__init__.py").touch()
    (folder / "parts" / "model.py").write_text("from .deep import layers\nfrom . import other\nfrom ... import outside\n")
    (folder / "parts" / "other.py").write_text("import needed_by_other\n")
    (folder / "parts" / "deep" / "__init__.py").touch()
    (folder / "parts" / "deep" / "layers.py").write_text("def late():\n    import only_when_called\n")
    found = facts(folder / "train.py")
    assert sorted(found["files"]) == [
        "parts/__init__.py",
        "parts/deep/__init__.py",
        "parts/deep/layers.py",
        "parts/model.py",
        "parts/other.py",
        "settings.py",
        "train.py",
    ]
    there = {name: (about["found"], about["optional"]) for name, about in found["imports"].items()}
    assert there == {
        "torch": (True, False),
        "not_installed": (False, False),
        "fast_json": (False, True),
        "needed_by_other": (False, False),
        "only_when_called": (False, True),
    }


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), ("def broken(", "Python cannot read it")])
def test_a_script_that_cannot_be_read(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "train.py").write_text(content)
    assert said in facts(tmp_path / "train.py")["error"]
