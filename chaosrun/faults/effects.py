"""What a fault does to its attempt and to the checkpoints, by its kind. Pure."""

import signal

from chaosrun.faults.fault import Fault


def outlives(fault: Fault) -> bool:
    """Whether it is seen to happen even where its process is killed with the attempt right after the fault was claimed."""
    return not fault.facts.ends_attempt or int(signal.SIGKILL) in fault.facts.signals


def is_notice(fault: Fault) -> bool:
    """The job is told to go and leaves some moments later, with a checkpoint of its own."""
    return fault.facts.notice


def damages(fault: Fault) -> bool:
    """It spoils the newest checkpoint, or leaves a folder behind, which only a later start looks at."""
    return fault.facts.damages is not None
