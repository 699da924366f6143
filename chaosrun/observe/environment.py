"""What must be equal on both legs for their bits to be comparable: versions, instruction set or GPU, threads, settings."""

import gc
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

from chaosrun.records.journal import write_durably
from chaosrun.records.order import HASH_ORDER

LIBRARIES = (
    ("accelerate", "accelerate.accelerator", "Accelerator"),
    ("transformers", "transformers.trainer", "Trainer"),
    ("datasets", "datasets.iterable_dataset", "IterableDataset"),
    ("torchdata", "torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader"),
    ("lightning", "lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch-lightning", "pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning-fabric", "lightning.fabric.fabric", "Fabric"),
    ("lightning-fabric", "lightning_fabric.fabric", "Fabric"),
)
"""Training libraries by name, each with the module and class of which a script that uses it has an object."""


def record_environment(path: Path) -> None:
    facts = json.dumps(environment_facts(), indent=1).encode()
    # Mostly unchanged since an earlier attempt: then the recovery does not wait for the disk.
    if not path.exists() or path.read_bytes() != facts:
        write_durably(path, facts)


def environment_facts() -> dict[str, object]:
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "accelerate": version("accelerate"),
        "numpy": numpy.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "deterministic": ("off", "warn", "strict")[torch.get_deterministic_debug_mode()],
        "python_hash_seed": os.environ.get("PYTHONHASHSEED", "random"),
        "hash_order": os.environ.get(HASH_ORDER, ""),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        **_float32_precision(),
        "libraries": libraries(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return facts


def _float32_precision() -> dict[str, str]:
    """How float32 is multiplied: "ieee", "tf32", …, "none" for torch's default.

    Newer torch has a setting for each backend. There the older settings raise once a script has used both kinds, so they are
    not read; `pin` sets the older ones, which every torch passes on to the newer.
    """
    backends: Any = torch.backends
    if hasattr(backends, "fp32_precision"):
        read = {
            "fp32_cuda_matmul": backends.cuda.matmul,
            "fp32_cudnn_conv": backends.cudnn.conv,
            "fp32_cudnn_rnn": backends.cudnn.rnn,
            "fp32_cpu_matmul": backends.mkldnn.matmul,
        }
        return {name: setting.fp32_precision for name, setting in read.items()}
    tf32 = {"fp32_cuda_matmul": backends.cuda.matmul.allow_tf32, "fp32_cudnn_conv": backends.cudnn.allow_tf32}
    return {name: "tf32" if allowed else "ieee" for name, allowed in tf32.items()}


def libraries() -> dict[str, str]:
    """Versions of those LIBRARIES that the script has used so far; one that is merely imported does not count."""
    return {
        # pytorch-lightning includes Fabric: not each of them is a distribution.
        library: str(getattr(sys.modules[module.partition(".")[0]], "__version__", "0"))
        for library, module, name in LIBRARIES
        if _in_use(getattr(sys.modules.get(module), name, None))
    }


def _in_use(kind: type | None) -> bool:
    """Whether an object of this class, or of a subclass, is alive."""
    kinds = [] if kind is None else [kind]
    for each in kinds:
        kinds += each.__subclasses__()
    return bool(kinds) and any(isinstance(value, tuple(kinds)) for value in gc.get_referrers(*kinds))
