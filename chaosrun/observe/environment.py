"""What must be equal on both legs for their bits to be comparable: versions, instruction set or GPU, threads, settings; and a
canary that shows whether two processes compute the same bits."""

import gc
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from chaosrun.observe.modes import outside_modes
from chaosrun.records.journal import write_durably
from chaosrun.records.order import HASH_ORDER

LIBRARIES = (
    ("accelerate", "accelerate.accelerator", "Accelerator"),
    ("transformers", "transformers.trainer", "Trainer"),
    ("diffusers", "diffusers.training_utils", "EMAModel"),
    ("datasets", "datasets.iterable_dataset", "IterableDataset"),
    ("torchdata", "torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader"),
    ("lightning", "lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch-lightning", "pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning-fabric", "lightning.fabric.fabric", "Fabric"),
    ("lightning-fabric", "lightning_fabric.fabric", "Fabric"),
)
"""Training libraries by name, each with the module and class of which a script that uses it has an object."""
LENGTH = 8192
"""Elements of the canary's longest sum: long enough for every kernel to split it."""


def record_environment(path: Path) -> dict[str, object]:
    """Write the facts to this file, and return them."""
    facts = environment_facts()
    _write(path, facts)
    return facts


def record_changes(path: Path, facts: Mapping[str, object]) -> None:
    """Write which settings are no longer as in `facts`, what `record_environment` returned: the script has changed them."""
    if changed := [name for name, value in settings().items() if value != facts.get(name, value)]:
        _write(path, {**facts, "changed": changed})


def _write(path: Path, facts: Mapping[str, object]) -> None:
    written = json.dumps(facts, indent=1).encode()
    # Mostly unchanged since an earlier attempt: then the recovery does not wait for the disk.
    if not path.exists() or path.read_bytes() != written:
        write_durably(path, written)


def environment_facts() -> dict[str, object]:
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "accelerate": version("accelerate"),
        "numpy": numpy.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **settings(),
        "libraries": libraries(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return facts


def settings() -> dict[str, object]:
    """What a script can change while it trains."""
    return {
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "deterministic": ("off", "warn", "strict")[torch.get_deterministic_debug_mode()],
        "python_hash_seed": os.environ.get("PYTHONHASHSEED", "random"),
        "hash_order": os.environ.get(HASH_ORDER, ""),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        **_float32_precision(),
    }


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


def canary(device: torch.device) -> str:
    """A digest of a few kernels' results on fixed inputs, 16 hex digits, to see whether two processes compute the same bits.

    The instruction set, the thread count, a library's version or the GPU's model change sums, matrix products, softmax, layer
    normalisation and convolution gradients in their last bits (hazards K1, K2, K7). Where the canaries of two ranks, attempts
    or legs differ, recovery is not what made the training differ. The same in any autograd or autocast context. Draws no
    random number and leaves no gradient behind.
    """
    hasher = xxhash.xxh3_64()
    with (
        outside_modes(),
        torch.inference_mode(False),
        torch.autocast(device.type, enabled=False),
        # The first pass may be one whose activations are checkpointed: what is computed here is none of them.
        torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged),
    ):
        # Irregular fractions, so that every order of summation rounds in its own way.
        values = torch.arange(1, LENGTH + 1, dtype=torch.float32, device=device).mul(0.6180339887).frac().sub(0.37)
        square = values[: 64 * 64].view(64, 64)
        images = values[: 2 * 4 * 16 * 16].view(2, 4, 16, 16)
        with torch.enable_grad():
            kernel = values[: 8 * 4 * 3 * 3].view(8, 4, 3, 3).clone().requires_grad_()
            torch.nn.functional.conv2d(images, kernel, padding=1).square().sum().backward()
        with torch.no_grad():
            results = (
                values.sum(),
                square @ square,
                values.view(8, -1).softmax(dim=1),
                torch.nn.functional.layer_norm(values.view(8, -1), (LENGTH // 8,)),
                kernel.grad,
            )
            for result in results:
                assert result is not None
                hasher.update(result.cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
