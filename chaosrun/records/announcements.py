"""The message of a process below a launcher when it begins to train, and the reply: one JSON line each way, on a socket.

All processes below a launcher have `Startup` in the environment variable VARIABLE, by which the start-up hook of an interpreter
knows that it is in a drill. The socket is in the abstract namespace: it leaves no file behind.
"""

from typing import Literal

import msgspec

from chaosrun.records.codec import Record
from chaosrun.records.order import WorkerOrder

VARIABLE = "CHAOSRUN_STARTUP"

LauncherCode = Literal["launcher_ended", "launcher_restarts", "other_world_size", "other_node", "signals_ignored"]
"""Acts of a launcher that end its attempt; `supervise.deaths` has the sentences."""


class Startup(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The settings that every process below a launcher finds in its environment."""

    socket: str
    """Name in the abstract namespace, without its leading zero."""
    seed: int
    deterministic: Literal["strict", "warn", "off"]
    threads: int
    world_size: int


class Announcement(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Says that a process begins to train; the kernel tells which process (SO_PEERCRED)."""

    rank: int
    world_size: int
    """The world size as the process sees it."""
    restarts: int = 0
    """How often its launcher has restarted its ranks."""
    ignores_sigterm: bool = False


class StartupAnswer(Record, frozen=True, kw_only=True):
    order: WorkerOrder | None = None
    refused: LauncherCode | None = None


decode_startup = msgspec.json.Decoder(Startup).decode
decode_announcement = msgspec.json.Decoder(Announcement).decode
decode_answer = msgspec.json.Decoder(StartupAnswer).decode
