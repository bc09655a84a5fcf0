"""A device "gpu" that computes on the CPU, refuses what CUDA refuses, and counts waits of the host and unordered sums.

Its tensors are wrappers, on torch's PrivateUse1 device, of CPU tensors with the real values. Real devices abort at
autograd in a torch built without CUDA.
"""

import collections
import contextlib
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import saecli

NAME, PACKAGE = "gpu", str(Path(saecli.__file__).parent)
aten = torch.ops.aten


def overloads(names: str) -> set[torch._ops.OpOverload]:
    """The default overloads of operators."""
    return {getattr(aten, name).default for name in names.split()}


WAITS = {aten.repeat_interleave.Tensor} | overloads(
    "_local_scalar_dense nonzero masked_select bincount equal _unique2 _linalg_eigh _linalg_svd "
    "linalg_cholesky"
)
# Of floats; index_put sorts.
UNORDERED = {aten.scatter_reduce.two, aten.scatter_reduce_.two} | overloads(
    "index_add index_add_ scatter_add scatter_add_ cumsum cumsum_ histc"
)
INDEXING = {aten.index.Tensor} | overloads("index_put_ index_put _index_put_impl_")
ADAMS = {aten._fused_adam_.default, aten._fused_adamw_.default}
waits: collections.Counter[str] = collections.Counter()  # by place, "file:line"
unordered: collections.Counter[str] = collections.Counter()  # likewise
_library = None


class OnGpu(torch.Tensor):
    """A tensor of the device; `held` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            dtype=held.dtype,
            storage_offset=held.storage_offset(),
            device=f"{NAME}:0",
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, new):
        torch.Tensor.data.__set__(self, new)
        self.held = new.held

    def tolist(self):  # torch refuses both for subclasses
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError("can't convert a gpu tensor to numpy; use Tensor.cpu() first")

    __array__ = numpy


def _run(op, args, kwargs):
    flat, shape = tree_flatten((args, kwargs))
    here = [value for value in flat if isinstance(value, OnGpu)]
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    elsewhere = [value for value in tensors if not isinstance(value, OnGpu)]
    _check(op, args, kwargs, here, elsewhere)
    stays = torch.device(kwargs.get("device") or NAME).type == NAME
    held = [value.held if isinstance(value, OnGpu) else value for value in flat]
    held_args, held_kwargs = tree_unflatten(held, shape)
    if held_kwargs.get("device") is not None:
        held_kwargs["device"] = torch.device("cpu")
    with torch.no_grad():
        result = op(*held_args, **held_kwargs)
    owners = {id(tensor.held): tensor for tensor in here}  # what works in place gives back its own

    def of_device(value):
        if not (stays and isinstance(value, torch.Tensor)):
            return value
        return owners[id(value)] if id(value) in owners else OnGpu(value)

    return tree_map(of_device, result)


def _check(op, args, kwargs, here, elsewhere):
    if op in WAITS:
        # With an output_size repeat_interleave knows how much there will be.
        if kwargs.get("output_size") is None:
            _wait(op)
    elif op is aten._to_copy.default or op is aten.copy_.default:
        copies = op is aten.copy_.default
        leaves = torch.device(kwargs.get("device") or NAME).type != NAME
        if copies:
            leaves = not isinstance(args[0], OnGpu)
        waits_not = kwargs.get("non_blocking") or (copies and args[2:] == (True,))
        if leaves or (elsewhere and not (waits_not and _is_pinned(elsewhere[0]))):
            _wait(op)
    elif op in INDEXING:
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
        fills = len(args) > 2 and args[2].numel() == 1
        numbers_elsewhere = any(i is not None and not isinstance(i, OnGpu) for i in args[1])
        if (masks and not fills) or numbers_elsewhere:
            _wait(op)
        _demand(isinstance(args[0], OnGpu), op, "a CPU tensor indexed by one on the device")
        values_are_here = len(args) < 3 or isinstance(args[2], OnGpu) or not args[2].dim()
        _demand(values_are_here, op, "values that are on the CPU")
    elif op in ADAMS:
        _demand(not elsewhere, op, f"{len(elsewhere)} tensors on the CPU, the step count perhaps")
        for same in zip(*args[:4], strict=True):
            lie_alike = len({t.stride() for t in same}) == 1
            _demand(lie_alike, op, "tensors and moments that lie differently in memory")
    elif here and elsewhere:
        wide = [tuple(t.shape) for t in elsewhere if t.dim()]
        mixes = not wide and (torch.Tag.pointwise in op.tags or "fill" in str(op))
        _demand(mixes, op, f"CPU tensors {wide}")
    generator = kwargs.get("generator")
    _demand(generator is None or generator.device.type == NAME or not here, op, "a CPU generator")
    if (
        op in UNORDERED
        and here[0].is_floating_point()
        and "amax" not in args
        and "amin" not in args
        and ("scatter_add" not in str(op) or _meet(args[1], args[2]))
    ):
        unordered[_place()] += 1


def _meet(dim, index):
    """Whether several values are added to one place."""
    return bool((index.held.sort(dim)[0].diff(dim=dim) == 0).any())


def _demand(holds, op, given):
    if not holds:
        raise RuntimeError(f"{op} on the device was given {given}, at {_place()}")


def _wait(op):
    waits[_place()] += 1


def _place():
    """The innermost line of the package; in a thread of autograd's, of the thread that waits for it."""
    for frame in (sys._getframe(2), sys._current_frames()[threading.main_thread().ident]):
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None:
            return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
    return "outside the package"


def _is_pinned(tensor):
    return getattr(tensor, "in_pinned_memory", False)


def _pinned(tensor):  # pinned memory needs a real device
    tensor = tensor.clone()
    tensor.in_pinned_memory = True
    return tensor


def register():
    """Make `torch.device("gpu")` known, once a process; skip the module of tests where that cannot be."""
    global _library
    if _library is not None:
        return
    can_be = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    if not can_be or torch.cuda.is_available():
        reason = "no device can be written in Python with this torch, or beside CUDA"
        pytest.skip(reason, allow_module_level=True)
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    torch.Tensor.pin_memory = _pinned
    _library = torch.library.Library("aten", "IMPL")

    def making(op):  # factories, and what torch.tensor(..., device=) comes down to
        return lambda *args, device=None, pin_memory=None, **kwargs: OnGpu(op(*args, **kwargs))

    for op in (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
    ):
        _library.impl(op, making(op), "PrivateUse1")

    def copy_from(source, into, non_blocking=False):
        if isinstance(source, OnGpu) or not (non_blocking and _is_pinned(source)):
            _wait("_copy_from")
        held = [t.held if isinstance(t, OnGpu) else t for t in (into, source)]
        held[0].copy_(held[1])
        return into

    _library.impl("_copy_from", copy_from, "PrivateUse1")


@contextlib.contextmanager
def within(counts):
    """Those of `waits`, or of `unordered`, while it is open, by place."""
    before, within = collections.Counter(counts), collections.Counter()
    yield within
    within.update(counts - before)


@pytest.fixture(autouse=True)
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as a device takes them, on the CPU too: then the results are the same to the bit."""
    monkeypatch.setattr("saecli.sae.codes.few_entries", lambda mask, wait=False: None)

    # Tensors of the device cannot be sparse.
    def dense_gradient(indices, values, shape):
        return values.new_zeros(shape).index_put_(tuple(indices), values)

    monkeypatch.setattr(torch, "sparse_coo_tensor", dense_gradient)
