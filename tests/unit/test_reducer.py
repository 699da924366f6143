"""What DDP's reducer says, as torch 2.13 writes it, in fewer words and with the remedy; and long messages in brief."""

import pytest

from chaosrun.supervise.deaths import in_brief, reducer_error

READY = (
    "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module "
    "parameter outside the `forward` function. Please make sure model parameters are not shared.\n"
    "Parameter at index 1 with name net2.weight has been marked as ready twice. This means that multiple autograd engine  "
    "hooks have fired for this particular parameter during this iteration."
)
UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your "
    "module has parameters that were not used in producing loss.\n"
)
NUMBERS = "Parameter indices which did not receive grad for rank 2: 0 1 5\n In addition, you can set the environment variable"
NAMES = "Parameters which did not receive grad for rank 2: net1.weight, net2.bias\nParameter indices which did not receive grad"
STATIC = "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration."


@pytest.mark.parametrize(
    ("message", "said", "remedy"),
    [
        (READY, "(Parameter at index 1 with name net2.weight has been marked as ready twice)", "model.module"),
        (READY.replace(" with name net2.weight", ""), "(Parameter at index 1 has been marked as ready twice)", "outside"),
        (
            UNFINISHED + NUMBERS,
            "(Parameter indices which did not receive grad for rank 2: 0 1 5)",
            "find_unused_parameters=True",
        ),
        (
            UNFINISHED + NAMES,
            "(Parameters which did not receive grad for rank 2: net1.weight, net2.bias)",
            "requires_grad_(False)",
        ),
        ("expect_autograd_hooks_ INTERNAL ASSERT FAILED at reducer.cpp", "ASSERT FAILED", "cannot begin in no_sync"),
        (STATIC, "Your training graph has changed in this iteration", "promises the same graph"),
    ],
)
def test_the_parameter_and_the_remedy_are_named(message: str, said: str, remedy: str) -> None:
    found = reducer_error(message)
    assert found is not None
    words, hint = found
    assert words.endswith(said) and "\n" not in words
    assert remedy in hint


def test_other_errors_are_none_of_its_business() -> None:
    assert reducer_error("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x6)") is None


def test_of_a_message_that_holds_another_process_s_traceback_the_ends_are_told() -> None:
    """As torch's CheckpointException, and what a loader's worker raised."""
    inner = '  File "utils.py", line 193, in reduce_scatter\n    local_data = map_fun()\nRuntimeError: Missing key: optim.lr.\n'
    dcp = "CheckpointException ranks:dict_keys([0, 1])\n" + "".join(
        f"Traceback (most recent call last): (RANK {rank})\n{inner}" for rank in (0, 1)
    )
    assert in_brief(dcp) == "CheckpointException ranks:dict_keys([0, 1]) … RuntimeError: Missing key: optim.lr."
    worker = f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{inner}"
    assert in_brief(worker).startswith("Caught RuntimeError in DataLoader worker process 0. … RuntimeError: Missing key")
    assert in_brief("size mismatch:\n  copying a param") == "size mismatch:\n  copying a param"
