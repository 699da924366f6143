"""What is done before a script destroys the process group by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chaosrun.protocol import rendezvous


def test_what_needs_the_group_is_done_before_the_script_destroys_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda group=None, name=name: done.append(name))
    context: Any = SimpleNamespace(session=None, script=None)
    rendezvous.watch_rendezvous(context)
    rendezvous.before_group_ends(lambda: done.append("last checkpoint"))
    with pytest.raises(ValueError, match="of the script"):
        try:
            raise ValueError("of the script")
        finally:
            torch.distributed.destroy_process_group()
    assert done == ["destroy_process_group"]
    for _ in range(2):
        torch.distributed.destroy_process_group()
    assert done[1:] == ["last checkpoint", "destroy_process_group", "destroy_process_group"]
