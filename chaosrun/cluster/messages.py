"""What the agent of a node and its fork server say to each other, and what a supervisor hears of both. Values only.

Between agent and fork server each is one line of JSON on a socket; from the agent to the supervisor Ray carries them.
"""

import msgspec

from chaosrun.records.announcements import LauncherCode
from chaosrun.records.events import NotPreloaded, WorkerExited
from chaosrun.records.order import WorkerOrder


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag="configure"):
    """Once, and before anything else."""

    target: str
    """What ranks run, as module:function."""
    preload: tuple[str, ...]
    """Modules."""
    env: dict[str, str | None]
    """After the imports; null takes a variable away."""
    standbys: int
    """Ranks to expect here."""
    temporary: str
    """Their TMPDIR."""
    left_out: tuple[NotPreloaded, ...] = ()
    """What an earlier try has shown."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag="start"):
    attempt: int
    orders: tuple[WorkerOrder, ...]
    listen: bool
    """This node hosts rank 0."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag="stop"):
    attempt: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ready"):
    pid: int
    left_out: tuple[NotPreloaded, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="failed"):
    """The preloads failed, or must not be shared; the server exits."""

    message: str
    traceback: str | None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="started"):
    attempt: int
    pids: dict[int, int]
    """By rank; empty for a command, whose ranks announce themselves."""
    port: int | None


class Announced(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="announced"):
    """A process that a command has started begins to train."""

    attempt: int
    rank: int
    pid: int
    start_ticks: int


class LauncherFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="launcher_failed"):
    """A command did what ends its attempt."""

    attempt: int
    node_rank: int
    code: LauncherCode
    rank: int | None = None
    """Of an announcement that was refused."""
    seen: int | None = None
    """Of other_world_size: what the rank saw."""
    announced: int = 0
    """Ranks that had begun to train here."""
    exit_code: int | None = None
    signal: int | None = None
    said: str = ""
    """Its last lines."""


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="start_failed"):
    attempt: int
    message: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="exited"):
    """A rank's process is gone; both null: how is not known."""

    attempt: int
    rank: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    completed: bool = False
    killed: bool = False
    """By its fork server."""
    collected: bool = False
    """Of both null: its launcher has collected its exit status, and the kernel keeps no other."""
    died_s: float

    @classmethod
    def of(cls, end: WorkerExited) -> "Exited":
        """What the journal has of a death."""
        return cls(
            attempt=end.attempt, rank=end.rank, pid=end.pid, exit_code=end.exit_code, signal=end.signal, died_s=end.died_s
        )


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stopped"):
    """Every process of the attempt is gone from the node."""

    attempt: int
    killed: tuple[int, ...]
    """Ranks."""


class ServerLost(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="server_lost"):
    """The fork server died. Its ranks are dead; that they exited and the attempt stopped was told before this."""

    message: str


class AgentLost(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="agent_lost"):
    """The agent or its node died."""

    message: str
    fault: str | None = None
    """The planned fault that ended the node, where that is known."""


class RankStack(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is."""

    pid: int
    state: str | None = None
    """Letter of its state in /proc; None when it is gone."""
    stack: tuple[str, ...] = ()
    """Of the main thread, innermost first, "file:line in function"; empty when it did not answer."""


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str
    hostname: str
    pid: int
    server_pid: int | None


ServerCommand = Configure | Start | Stop
ServerEvent = Ready | Failed | Started | StartFailed | Announced | LauncherFailed | Exited | Stopped
AgentEvent = Started | Announced | LauncherFailed | Exited | Stopped | ServerLost
NodeEvent = AgentEvent | AgentLost
"""What a supervisor hears of a node."""

decode_command = msgspec.json.Decoder(ServerCommand).decode
decode_event = msgspec.json.Decoder(ServerEvent).decode
decode_order = msgspec.json.Decoder(WorkerOrder).decode
encode = msgspec.json.Encoder().encode


def line(message: ServerCommand | ServerEvent) -> bytes:
    return encode(message) + b"\n"
