"""What a script may have set in its process and in the libraries that it uses, beside its own variables: settings, registered
functions, what waits in pipes. Changes nothing."""

import array
import contextlib
import ctypes
import decimal
import fcntl
import gc
import locale
import logging
import os
import resource
import signal
import socket
import stat
import sys
import termios
import time
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from chaosrun.observe.held import OWN_FILES
from chaosrun.observe.opened import open_files

OF_AN_ATTEMPT = ("CHAOSRUN_", "MASTER_", "TORCHELASTIC_", "TORCH_DISTRIBUTED_DEBUG", "PYTEST_CURRENT_TEST", "__KMP_")
"""Prefixes of environment variables that differ from attempt to attempt: OpenMP's holds the process's number and an address."""
OF_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
OF_OTHERS = ("/memfd:chaosrun", "/memfd:/.nvidia", "/memfd:.nvidia")
"""Files in memory that are not the script's."""
OF_A_LOCK = 1
"""Bytes that wait in a pipe which native code (libuv, of torch's store) uses as a lock: they are counted."""
SIGNALS = sorted(signal.valid_signals())


def settings() -> Iterator[Any]:
    """Settings of libraries."""
    cuda, future = torch.backends.cuda, torch.__future__
    yield from (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.get_num_interop_threads())
    yield from ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    yield from (torch.is_autocast_cache_enabled(), torch.get_deterministic_debug_mode())
    yield from (torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    yield from (torch.get_default_device(), torch.is_warn_always_enabled(), torch.utils.deterministic.fill_uninitialized_memory)  # pyright: ignore[reportAttributeAccessIssue]
    yield from (future.get_overwrite_module_params_on_conversion(), future.get_swap_module_params_on_conversion())
    yield from _of_precision()
    yield from (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
    yield from (cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    yield from (cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction)
    yield from _of_backends()
    yield "flushes" if not torch.tensor(1e-310, dtype=torch.float64) * 1.0 else "denormals"
    yield from (numpy.geterr(), numpy.getbufsize(), socket.getdefaulttimeout())
    context = decimal.getcontext()
    yield [
        *(getattr(context, name) for name in OF_DECIMAL),
        sorted(each.__name__ for each, is_set in context.traps.items() if is_set),
    ]
    yield from (warnings.filters, locale.setlocale(locale.LC_ALL), logging.root.manager.disable)
    named = logging.root.manager.loggerDict.items()
    loggers = [("", logging.root), *((name, each) for name, each in named if isinstance(each, logging.Logger))]
    yield sorted((name, each.level, each.disabled) for name, each in loggers if each.level or each.disabled)


def _of_precision() -> Iterator[Any]:
    """How exactly products are computed. torch refuses to tell by its older settings once a newer one was used."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    for read in (torch.get_float32_matmul_precision, lambda: cudnn.allow_tf32, lambda: cuda.matmul.allow_tf32):
        try:
            yield read()
        except RuntimeError:
            yield "told by fp32_precision"
    yield [getattr(each, "fp32_precision", None) for each in (torch.backends, cuda.matmul, cudnn)]


def _of_backends() -> Iterator[Any]:
    """The properties of all modules of torch.backends that have some; of the others, how einsum is done."""
    yield from (torch.backends.quantized.engine, torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy)  # pyright: ignore[reportAttributeAccessIssue]
    yield from (
        torch._C._get_nnpack_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._is_multithreading_enabled(),
    )
    for name, module in sorted(vars(torch.backends).items()):
        properties = ((key, each) for key, each in vars(type(module)).items() if isinstance(each, torch.backends.ContextProp))
        for key, each in properties:
            with contextlib.suppress(RuntimeError):  # of another build, or replaced by a newer one that is in use
                yield name, key, each.getter()


def registries() -> Iterator[tuple[str, Any]]:
    """Functions that a script has registered with a library or the system, by the name of the registry."""
    for name in ("torch.nn.modules.module", "torch.optim.optimizer"):
        known = vars(sys.modules[name]).items()
        hooks = {key: list(each.values()) for key, each in known if key.startswith("_global_") and isinstance(each, dict)}
        yield from ((key, [each for each in found if not is_ours(each)]) for key, found in sorted(hooks.items()))
    yield (
        "hooks of saved tensors",
        getattr(sys.modules["torch._C._autograd"], "_top_saved_tensors_default_hooks", lambda _: None)(True),
    )
    yield "collating", list(vars(sys.modules["torch.utils.data._utils.collate"])["default_collate_fn_map"].values())
    yield "errors of numpy", numpy.geterrcall()
    handlers = ((number, signal.getsignal(number)) for number in SIGNALS)
    yield from ((f"signal {number}", each) for number, each in handlers if callable(each) and not is_ours(each))
    yield "collection", [each for each in gc.callbacks if not is_ours(each)]


def is_ours(value: Any) -> bool:
    """Whether it is chaosrun's own, or a library's function that chaosrun has wrapped."""
    if isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(OWN_FILES):
        return True
    return str(getattr(value, "__module__", "")).partition(".")[0] == "chaosrun"


def of_the_process(environment: Mapping[str, str], folder: str, waiting: Mapping[int, int]) -> Iterator[Any]:
    """`environment`, `folder`: as they were before the script's first line. `waiting`: what `waiting_bytes` gives."""
    yield from (sys.argv, os.path.relpath(os.getcwd(), folder))
    changed = {key: value for key, value in os.environ.items() if environment.get(key) != value}
    changed |= {key: "" for key in environment.keys() - os.environ.keys()}
    yield sorted((key, value) for key, value in changed.items() if not key.startswith(OF_AN_ATTEMPT))
    yield sorted(each for each in _native_environment() if not each.startswith(OF_AN_ATTEMPT))
    yield sorted(f"{os.path.basename(path)} at {place}" for path, writes, place in open_files() if not writes)
    yield sum(count == OF_A_LOCK for count in waiting.values())
    above = os.path.dirname(os.path.dirname(folder))  # made anew for each leg, as the working folder is
    yield [os.path.relpath(path, folder) if f"{path}/".startswith(f"{above}/") else path for path in sys.path]
    yield from (sys.getrecursionlimit(), sys.get_int_max_str_digits(), time.tzname, gc.isenabled(), gc.get_threshold())
    yield next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    yield from (os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0)))
    yield [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_STACK)]
    yield sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    yield [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    yield [bool(signal.getitimer(which)[0]) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]


def _native_environment() -> Iterator[str]:
    """What native code and programs find in the environment other than `os.environ` says: it was set by `os.putenv`."""
    listed = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[bytes, bytes] = {}
    for number in range(1 << 16):
        if not listed or (entry := listed[number]) is None:
            break
        found.setdefault(*entry.partition(b"=")[::2])
    known = os.environb
    yield from (os.fsdecode(key + b"=" + value) for key, value in found.items() if known.get(key) != value)
    yield from (f"{os.fsdecode(key)} is gone" for key in known.keys() - found.keys())


def descriptors() -> dict[int, tuple[int, int]]:
    """What this process has open, by device and inode."""
    found: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            about = os.fstat(int(name))
            found[int(name)] = about.st_dev, about.st_ino
    return found


def unread(before: Collection[tuple[int, int]], waiting: Mapping[int, int]) -> Iterator[str]:
    """What waits in pipes, counters and memory files opened since: their contents cannot be read without taking them out."""
    for number, inode in descriptors().items():
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if "[eventfd]" in name:
                if "eventfd-count:                0\n" not in Path(f"/proc/self/fdinfo/{number}").read_text():
                    yield "a counter of events that is not 0"
            elif inode not in before and name.startswith("/memfd:") and not name.startswith(OF_OTHERS):
                yield "a file in memory"
            elif inode not in before and waiting.get(number, 0) > OF_A_LOCK:
                yield "data that wait in a pipe"


def waiting_bytes() -> dict[int, int]:
    """How many bytes wait in each pipe that this process can read, and each socket between processes of this machine; those
    of a network are torch's own, and what it has printed waits for another to read it. No socket object is made of one: that
    could make it non-blocking, for the script as well."""
    local = {int(line.split()[6]) for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    found: dict[int, int] = {}
    for number in descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile
            about = os.fstat(number)
            reads = stat.S_ISFIFO(about.st_mode) and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if reads or (stat.S_ISSOCK(about.st_mode) and about.st_ino in local):
                count = array.array("i", [0])
                fcntl.ioctl(number, termios.FIONREAD, count)
                found[number] = count[0]
    return found
