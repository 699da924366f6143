"""Which function strikes for which kind. A kind whose striker is the supervisor has none here."""

from collections.abc import Callable, Mapping

from chaosrun.faults import memory as corruption
from chaosrun.faults import process, rendezvous, storage
from chaosrun.faults.strike import Strike

ARMS: Mapping[str, Callable[[Strike], None]] = {
    "kill": process.kill,
    "preempt": process.preempt,
    "stop": process.stop,
    "pause": process.pause,
    "segfault": process.segfault,
    "exception": process.exception,
    "exit": process.exit_silently,
    "memory": process.memory,
    "loader_worker": process.loader_worker,
    "slow": process.slow,
    "hang": process.hang,
    "flip_bit": corruption.flip_bit,
    "nan": corruption.nan,
    "diverge": corruption.diverge,
    "truncate": storage.truncate,
    "zero_tail": storage.zero_tail,
    "flip_file_bit": storage.flip_file_bit,
    "missing_file": storage.missing_file,
    "missing_manifest": storage.missing_manifest,
    "foreign_manifest": storage.foreign_manifest,
    "stale_staging": storage.stale_staging,
    "no_space": storage.no_space,
    "io_error": storage.io_error,
    "slow_storage": storage.slow_storage,
    "failed_rename": storage.failed_rename,
    "port_taken": rendezvous.port_taken,
    "no_arrival": rendezvous.no_arrival,
}
