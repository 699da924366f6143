"""Raylets of this machine for a driver: a Ray of several nodes, without the processes that only people look at."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from chaosrun.cluster.connection import OBJECT_STORE_BYTES, started_for_one_driver
from chaosrun.processes import kill_marked

MARK = "CHAOSRUN_TEST_RAYLETS"
"""The environment variable that everything of these nodes has; its value is their folder."""


@contextmanager
def raylets(**head: Any) -> Iterator[Cluster]:
    """The head alone, for `add` to add others to; in the end they are killed, with what they leave."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Ray's test cluster writes its address below RAY_TMPDIR, into a folder that it does not make.
        os.environ["RAY_TMPDIR"] = os.environ[MARK] = folder
        Path(folder, "ray").mkdir()
        cluster = Cluster()
        try:
            add(cluster, temp_dir=folder, **head)
            yield cluster
        finally:
            for node in cluster.list_all_nodes()[::-1]:
                cluster.remove_node(node, allow_graceful=False)
            # They would go on to write into the folder.
            kill_marked(f"{MARK}={folder}", titles=(b"ray::",))


def add(cluster: Cluster, **node: Any) -> Any:
    with started_for_one_driver():
        return cluster.add_node(object_store_memory=OBJECT_STORE_BYTES, **node)
