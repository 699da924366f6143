"""The trace: one JSON line per event, per rank and attempt; one writer a file. A torn last line is tolerated, nothing else.

Line kinds (key `kind`), written by a rank in this order:

- `start`      v, attempt, rank, world_size, pid, entered_s (when it turned to its checkpoint), time_s (when that was
               restored), position {epoch, batches, step}, restored (checkpoint name or null), rng (digest), canary (digest
               of kernels' results on fixed inputs, of this process), param (fingerprint), params (base64), tensors (names,
               the order of `params` and `grads`), digests (of the restored state, as in `end`; null without a restore)
- `probe`      items (independent, global_rng, draws, never_repeats or unknown), detail; rank 0, first attempt only
- `source`     epoch, own (type of the script's sampler or stream that is never told its epoch, or null), held (what the
               script's samplers and dataset hold when the epoch, or the rest of it, is opened: path to value)
- `loader_workers`  epoch, workers (by loader worker: {python, numpy, torch}, a digest of where each stream stands after
               worker_init_fn; null for one that did not say); once an epoch, for persistent workers once
- `buckets`    step, layout (list of lists of parameter indices, or null without DDP), primed (bool)
- `step`       step, epoch, batches (done in this epoch, this step's included), time_s, ids (per micro-batch a list of sample
               ids, or null), batch (per micro-batch a digest), rng (digest before the step's first micro-batch), loss (per
               micro-batch, float.hex()), lr (per parameter group, float.hex(), as the optimizer used it), grad, grads (as
               the optimizer saw them: reduced and clipped), param, params (after the step); of an accumulation window also
               items (over all ranks): each loss is then the micro-batch's sum / items, and they add up over the ranks
- `checkpoint` step, name, time_s, duration_s, digests (of this rank's state, as in `end`); of a save that changed live state
               also changed (by component, the first names) and hooks (names of the script's, run on saving or loading)
- `end`        step, position, time_s, digests {model {tensor: hex}, buffers {tensor: hex}, optimizer {tensor: hex},
               scheduler {name: hex}, rng {stream: hex}, registered {name: hex}}, checkpoint (name of the final one); of an
               undisturbed leg's rank 0 also outside (what the training changed and nobody saves, in words), if any

`grad` and `param` are 64-bit fingerprints of all tensors, 16 hex digits; `grads` and `params` are base64 of one
little-endian uint32 a tensor: enough to name the tensor, the 64-bit value decides.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaosrun.errors import RecoveryError

TRACE_VERSION = 1


class TornRecordError(RecoveryError, ValueError):
    """A line in the middle of a record file is not JSON: the file was damaged, not cut off."""


class TraceWriter:
    """Appends lines to one trace file; each line reaches the kernel before `write` returns (a SIGKILL loses nothing)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        done = os.write(self._file, line)
        while done < len(line):
            done += os.write(self._file, line[done:])

    def close(self) -> None:
        os.close(self._file)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file.

    A last line without its newline is a torn write and is left out. Raises TornRecordError, naming file and line, for
    anything else that is not a JSON object; FileNotFoundError when there is no such file.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TornRecordError(f"{path}:{number}: not a JSON record ({error})") from error
            if not isinstance(record, dict):
                raise TornRecordError(f"{path}:{number}: not a JSON object")
            yield record
