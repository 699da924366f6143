import copy
import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from chaosrun.observe import fingerprint as subject
from chaosrun.observe.fingerprint import digests, fingerprint, part_of, spots, tensor_digest


def device_digest(tensor, chunk_words=subject.CHUNK_WORDS):
    """What a tensor on another device would get: the same formula, on the CPU."""
    words = subject._words(subject._dense(tensor))
    sums = subject._partial_sums(words, lambda device: subject._weights(device)[:chunk_words])
    return subject._finish(
        [int(value) for value in torch.stack(sums)] if sums else [], subject._seed(tensor.dtype, tensor.shape)
    )


def device_digest_in_small_chunks(tensor):
    return device_digest(tensor, chunk_words=3)


BOTH = pytest.mark.parametrize("digest", [tensor_digest, device_digest, device_digest_in_small_chunks])
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def random_bits(dtype, shape, seed=0):
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_are_equal_and_every_flipped_bit_shows(digest, dtype):
    tensor = random_bits(dtype, (3, 5))
    expected = digest(tensor)
    assert digest(tensor.clone()) == expected
    assert 0 <= expected < 1 << 64
    seen = {expected}
    raw = tensor.clone().reshape(-1).view(torch.uint8)
    for place in range(len(raw)):
        for bit in range(1 if dtype == torch.bool else 8):
            damaged = raw.clone()
            damaged[place] ^= 1 << bit
            seen.add(digest(damaged.view(dtype).reshape(3, 5)))
    assert len(seen) == 1 + len(raw) * (1 if dtype == torch.bool else 8)


@BOTH
def test_shape_dtype_and_emptiness_count(digest):
    values = torch.zeros(6, dtype=torch.int32)
    variants = [values, values.reshape(2, 3), values.reshape(3, 2), values.view(torch.float32), values[:5], values[:0]]
    variants += [torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(0.0), torch.tensor([0.0]), torch.tensor(0)]
    assert len({digest(variant) for variant in variants}) == len(variants)


@BOTH
def test_nan_payloads_and_signed_zeros_count(digest):
    nans = [struct.unpack("<i", struct.pack("<I", bits))[0] for bits in (0x7FC00000, 0x7FC00001, 0xFFC00000)]
    assert len({digest(torch.tensor([bits], dtype=torch.int32).view(torch.float32)) for bits in nans}) == 3
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_every_swap_of_two_elements_shows(digest, dtype):
    tensor = random_bits(dtype, (12,), seed=3)
    seen = {digest(tensor)}
    count = 1
    for first in range(12):
        for second in range(first):
            if tensor[first].reshape(1).view(torch.uint8).tolist() == tensor[second].reshape(1).view(torch.uint8).tolist():
                continue
            swapped = tensor.clone()
            swapped[first], swapped[second] = tensor[second], tensor[first]
            seen.add(digest(swapped))
            count += 1
    assert len(seen) == count > 30


@BOTH
def test_a_value_and_its_negative_swapped_show(digest):
    # They differ in the highest bit only: where weighted sums mod 2^64 are weakest.
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert digest(torch.tensor([1.5, -1.5], dtype=dtype)) != digest(torch.tensor([-1.5, 1.5], dtype=dtype))


@BOTH
def test_memory_layout_does_not_count(digest):
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    expected = digest(tensor)
    assert digest(tensor.transpose(0, 2).contiguous().transpose(0, 2)) == expected
    assert digest(torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].reshape(2, 3, 4)) == expected
    assert digest(tensor[:, ::2]) == digest(tensor[:, ::2].clone())
    assert digest(tensor.requires_grad_()) == expected
    assert digest(torch.nn.Parameter(tensor.detach())) == expected
    odd = torch.arange(9.0).to(torch.bfloat16)
    assert digest(odd[1:]) == digest(odd[1:].clone())


@BOTH
def test_lazy_conjugates_count_as_their_values(digest):
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj()) != digest(tensor)


def test_the_device_formula_is_the_one_in_the_docstring():
    tensor = torch.tensor([3, -7, 1 << 30], dtype=torch.int32)
    weights = subject._weights(torch.device("cpu"))[:3].tolist()
    total = sum(word * weight for word, weight in zip(tensor.tolist(), weights, strict=True))
    total = total * (subject._splitmix(0) | 1) % (1 << 64)
    seed = xxhash.xxh3_64_intdigest(b"torch.int32 (3,)")
    assert device_digest(tensor) == xxhash.xxh3_64_intdigest(total.to_bytes(8, "little"), seed=seed)


def test_small_tensors_on_a_device_are_digested_together_as_alone(monkeypatch):
    monkeypatch.setattr(subject, "SMALL_WORDS", 40)
    monkeypatch.setattr(subject, "JOINED_WORDS", 120)
    shapes = [(), (7,), (5, 8), (41,), (3, 40)]
    tensors = [random_bits(dtype, shape, seed) for dtype in DTYPES for seed, shape in enumerate(shapes)]
    tensors[2:2] = [torch.empty(0), torch.empty(0, dtype=torch.int16)]
    numbered = enumerate(subject._words(subject._dense(tensor)) for tensor in tensors)
    owners, sums = subject._sums_on_device(numbered)
    assert len(owners) == len(sums)
    for number, tensor in enumerate(tensors):
        parts = [value for owner, value in zip(owners, sums.tolist(), strict=True) if owner == number]
        assert subject._finish(parts, subject._seed(tensor.dtype, tensor.shape)) == device_digest(tensor)


def test_weights_are_odd_distinct_and_fixed():
    weights = subject._weights(torch.device("cpu"))
    assert bool((weights & 1).all())
    assert weights[:2].tolist() == [-4115056266720065879, -2461909746425293901]
    assert len(weights[:100_000].unique()) == 100_000


def test_the_partial_sums_do_not_depend_on_the_order_of_addition():
    tensor = random_bits(torch.float32, (1000,), seed=5)
    words = subject._words(tensor)
    weights = subject._weights(words.device)[:1000]
    order = torch.randperm(1000)
    assert int((words[order] * weights[order]).sum()) == int((words * weights).sum())


def test_no_copy_of_a_contiguous_cpu_tensor():
    tensor = torch.arange(8, dtype=torch.int32)
    memory = subject._memory(subject._dense(tensor))
    tensor[0] = 77
    assert memory.raw == tensor.numpy().tobytes()


def without_memory():
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse_csr(), torch.empty(3, device="meta"), without_memory()],
    ids=["sparse rows", "meta", "freed"],
)
def test_tensors_without_dense_memory_are_refused(tensor):
    with pytest.raises(TypeError, match="cannot fingerprint"):
        tensor_digest(tensor)


def test_a_sparse_gradient_counts_by_what_it_adds_up_to():
    indices = torch.tensor([[2, 0, 2]])
    split = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 5.0, 2.0]), (4,))
    whole = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([5.0, 3.0]), (4,))
    other = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([5.0, 4.0]), (4,))
    assert tensor_digest(split) == tensor_digest(whole) != tensor_digest(other)
    assert tensor_digest(whole) != tensor_digest(whole.to_dense())


class Eighth(torch.Tensor):
    """In 8 bits and a scale for each block, as torchao keeps an optimizer's moments."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Eighth":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> torch.Tensor:
        raise NotImplementedError(f"{func}")


@pytest.mark.parametrize("size", [256, 65536])
def test_a_tensor_that_wraps_others_counts_by_all_of_them(size: int) -> None:
    def kept(first: int = 1, scale: float = 0.5) -> Eighth:
        return Eighth(torch.tensor([first, *[7] * (size - 1)], dtype=torch.uint8), torch.full((size // 256,), scale))

    for told in (tensor_digest, lambda tensor: digests({"moment": tensor}), lambda tensor: digests(spots({"moment": tensor}))):
        assert told(kept()) == told(kept())
        assert len({str(told(each)) for each in (kept(), kept(first=2), kept(scale=0.25))}) == 3


def test_fingerprint_names_the_tensor_that_differs():
    tensors = [torch.ones(3), None, torch.zeros(2)]
    first = fingerprint(tensors)
    assert len(first.value) == 16 and int(first.value, 16) >= 0
    each = np.frombuffer(first.each, dtype="<u4")
    assert each.tolist() == [
        tensor_digest(tensors[0]) & 0xFFFFFFFF,
        subject.NONE_DIGEST & 0xFFFFFFFF,
        tensor_digest(tensors[2]) & 0xFFFFFFFF,
    ]
    second = fingerprint([torch.ones(3), None, torch.tensor([0.0, -0.0])])
    changed = np.frombuffer(second.each, dtype="<u4") != each
    assert changed.tolist() == [False, False, True]
    assert second.value != first.value
    assert fingerprint([tensors[2], None, tensors[0]]).value != first.value
    assert fingerprint([torch.ones(3), torch.zeros(0), torch.zeros(2)]).value != first.value
    assert fingerprint([]).each == b""


def test_fingerprints_do_not_disturb_autograd_or_rng():
    parameter = torch.nn.Parameter(torch.ones(3))
    before = torch.random.get_rng_state()
    version = parameter._version
    fingerprint([parameter, parameter.grad])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert parameter._version == version


def test_digests_of_a_nested_state_are_by_sorted_path():
    state = OrderedDict(
        state={0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}, 10: {"exp_avg": torch.zeros(2)}},
        param_groups=[{"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "maximize": False, "params": [0, 1], "name": "all"}],
        nothing={},
    )
    found = digests(state)
    assert list(found) == sorted(found)
    assert found["state/0/exp_avg"] == f"{tensor_digest(torch.ones(2)):016x}"
    assert found["param_groups/0/betas/1"] == f"float:{(0.999).hex()}"
    assert found["param_groups/0/fused"] == "None"
    assert found["param_groups/0/maximize"] == "False"
    assert found["param_groups/0/params/1"] == "int:1"
    assert found["param_groups/0/name"] == "str:all"
    assert found["nothing"] == "empty"


def test_digests_of_a_real_optimizer_and_scheduler_are_the_same_after_a_round_trip():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    scheduler.step()
    twin = torch.optim.AdamW(model.parameters())
    assert digests(twin.state_dict()) != digests(optimizer.state_dict())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert digests(twin.state_dict()) == digests(optimizer.state_dict())
    assert digests(scheduler.state_dict())["last_epoch"] == "int:1"
    twin.state[model.bias]["exp_avg"][0] += 1
    changed = {path for path, digest in digests(twin.state_dict()).items() if digest != digests(optimizer.state_dict())[path]}
    assert changed == {"state/1/exp_avg"}


def test_scalars_of_different_types_or_bits_differ():
    values = [0, False, None, 0.0, -0.0, "0", "None", b"0", 1e-320, float("inf"), np.float32(0), np.int64(0), torch.tensor(0)]
    values += [struct.unpack(">d", bytes.fromhex(bits))[0] for bits in ("7ff8000000000000", "7ff8000000000001")]
    values += ["long" * 50, "long" * 51, np.zeros(2), np.zeros((2, 1)), np.array([0.0, -0.0]), np.zeros(2, np.float32)]
    assert len({digests({"x": value})["x"] for value in values}) == len(values)


def test_lists_and_tuples_count_as_the_same_but_their_length_counts():
    assert digests({"x": [1, 2]}) == digests({"x": (1, 2)}) != digests({"x": [1]})
    assert digests({"x": []}) != digests({}) == {}


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": [object()]}}, "a/b/0: a builtins.object"),
        ({"a": {1.5: 0}}, "a: a key of type float"),
        ({"s": {1}}, "s: a builtins.set"),
        ({"o": np.array([object()])}, "o: a numpy.ndarray"),
    ],
)
def test_unknown_types_are_named_by_path(state, where):
    with pytest.raises(TypeError, match=where):
        digests(state)


def test_two_leaves_with_one_path_are_refused():
    with pytest.raises(ValueError, match="'a/b'"):
        digests({"a": {"b": 1}, "a/b": 2})


def test_the_rank_is_known_when_the_process_group_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.zeros(2)
    flat._fqns = ["weight"]  # type: ignore[attr-defined]
    monkeypatch.setenv("RANK", "3")
    assert part_of(flat) == "[flat, rank 3]"


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CountingOperations(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counting, CountingOperations])
def test_the_modes_of_a_script_see_none_of_it(mode: type[Counting | CountingOperations]) -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    expected = tensor_digest(turned)
    with mode() as counting, mode() as inner:
        assert tensor_digest(turned) == expected
        assert (counting.calls, inner.calls) == (0, 0)
        turned.add(1)
        assert counting.calls == inner.calls > 0
