"""Messages between a node's agent and its fork server, and events that the supervisor receives from both. Values only.

Between agent and fork server each is one line of JSON on a socket; Ray carries events from the agent to the supervisor.
"""

import msgspec

from chaosrun.records.announcements import LauncherCode
from chaosrun.records.events import NotPreloaded, WorkerExited
from chaosrun.records.order import WorkerOrder


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag="configure"):
    """Sent once, before anything else."""

    target: str
    """The function that ranks run, as module:function."""
    preload: tuple[str, ...]
    """Modules to import."""
    env: dict[str, str | None]
    """Environment to set after the imports; null removes a variable."""
    standbys: int
    """Number of ranks to expect on this node."""
    temporary: str
    """TMPDIR of the ranks."""
    left_out: tuple[NotPreloaded, ...] = ()
    """Modules that an earlier try found unsafe to fork."""


class StartRanks(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag="start"):
    attempt: int
    orders: tuple[WorkerOrder, ...]
    listen: bool
    """Whether this node hosts rank 0."""


class StopRanks(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag="stop"):
    attempt: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ready"):
    pid: int
    left_out: tuple[NotPreloaded, ...] = ()


class ServerFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="failed"):
    """The preloads failed, or must not be shared between ranks; the server exits."""

    message: str
    traceback: str | None


class RanksStarted(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="started"):
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
    """A command did something that ends its attempt."""

    attempt: int
    node_rank: int
    code: LauncherCode
    rank: int | None = None
    """The rank whose announcement was refused."""
    seen: int | None = None
    """For other_world_size: the world size that the rank saw."""
    announced: int = 0
    """Number of ranks that had begun to train on this node."""
    exit_code: int | None = None
    signal: int | None = None
    said: str = ""
    """Last lines of the command's output."""


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="start_failed"):
    message: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="exited"):
    """A rank's process has ended; exit code and signal are both null if it is unknown how."""

    attempt: int
    rank: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    completed: bool = False
    killed: bool = False
    """Whether its fork server killed it."""
    collected: bool = False
    """Why both are null: the launcher has collected the exit status, and the kernel keeps no copy."""
    died_s: float

    @classmethod
    def of(cls, end: WorkerExited) -> "Exited":
        """The event again from the journal's record of a death."""
        return cls(
            attempt=end.attempt, rank=end.rank, pid=end.pid, exit_code=end.exit_code, signal=end.signal, died_s=end.died_s
        )


class RanksStopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stopped"):
    """Every process of the attempt is gone from the node."""

    attempt: int
    killed: tuple[int, ...]
    """Ranks that were killed."""


class AgentDied(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="agent_lost"):
    """The agent or its node died."""

    message: str
    fault: str | None = None
    """The planned fault that ended the node, if known."""


class RankStack(msgspec.Struct, frozen=True, kw_only=True):
    """The stack of a rank."""

    pid: int
    state: str | None = None
    """State letter in /proc; None if the process is gone."""
    stack: tuple[str, ...] = ()
    """Of the main thread, innermost first, "file:line in function"; empty if it did not answer."""


ServerCommand = Configure | StartRanks | StopRanks
ServerEvent = Ready | ServerFailed | RanksStarted | StartFailed | Announced | LauncherFailed | Exited | RanksStopped
AgentEvent = Announced | LauncherFailed | Exited | RanksStopped
NodeEvent = AgentEvent | AgentDied
"""Events of a node that a supervisor receives."""

decode_command = msgspec.json.Decoder(ServerCommand).decode
decode_event = msgspec.json.Decoder(ServerEvent).decode
decode_order = msgspec.json.Decoder(WorkerOrder).decode
encode = msgspec.json.Encoder().encode


def line(message: ServerCommand | ServerEvent) -> bytes:
    return encode(message) + b"\n"
