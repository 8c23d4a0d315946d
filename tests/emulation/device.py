"""The emulated device: torch's PrivateUse1 backend in Python, with host memory behind its tensors.

A tensor of the device shares its memory with a CPU tensor through DLPack, whose device field is rewritten. A fallback runs every
operator on CPU aliases. It rejects operators that mix devices, and float64; fresh memory is NaN or garbage; a copy to the host
that does not block holds garbage until the host waits for the device, and waits itself unless the memory is page-locked. Events
have the host's time, and later ones that of the work in `queue_work`, which takes the device long and the host nothing. Without
`usage.present`, the machine has the device's software alone, and any use of the device is rejected.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.emulation import usage
from tests.emulation.usage import Rejected, record, record_operator

TYPE = "neuron"
CPU = torch.device("cpu")
CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten
LOOKUPS = ("index_select", "gather", "scatter", "scatter_add", "index_add", "embedding", "cat", "stack")
"""Operators that reject even a single number on the host."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_libraries: list[torch.library.Library] = []  # registrations last as long as these
_copies: list[tuple[Tensor, Tensor]] = []  # to the host and not complete: (copied, destination)
_page_locked: set[int] = set()  # addresses of host memory
_queued_seconds = 0.0  # of `queue_work`


# Memory


class _Managed(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_index", ctypes.c_int))


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12


def _alias(tensor: Tensor, device_type: int) -> Tensor:
    if not usage.present:
        raise Rejected("this machine has no device")
    with torch._C._AutoDispatchBelowAutograd():
        capsule = torch._C._to_dlpack(tensor.detach() if tensor.requires_grad else tensor)
        managed = _Managed.from_address(_capsule_pointer(capsule, b"dltensor"))
        managed.device_type, managed.device_index = device_type, 0
        return torch._C._from_dlpack(capsule)


def on_device(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == TYPE


def device_alias(tensor: Tensor) -> Tensor:
    """The memory of a CPU tensor as a tensor of the device."""
    if tensor.dtype == torch.float64:
        raise Rejected("float64 on the device")
    return _alias(tensor, _DLPACK_EXTENSION)


def host_alias(tensor: Tensor) -> Tensor:
    """The memory of a tensor of the device as a CPU tensor."""
    return _alias(tensor, _DLPACK_CPU)


def fill_garbage(tensor: Tensor) -> Tensor:
    """Overwrite a CPU tensor with NaN, or large integers."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3)


def synchronize() -> None:
    """Let the host wait for the device: copies to the host complete."""
    while _copies:
        copied, destination = _copies.pop(0)
        destination.copy_(copied)


def lock_pages(tensor: Tensor) -> Tensor:
    """Count a CPU tensor's memory as page-locked. The real one needs an allocator in C++."""
    storage = tensor.untyped_storage()
    _page_locked.add(storage.data_ptr())
    weakref.finalize(storage, _page_locked.discard, storage.data_ptr())
    return tensor


def _is_page_locked(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _page_locked


def queue_work(seconds: float) -> None:
    """Queue work that takes the device so long, and the host no time."""
    global _queued_seconds
    _queued_seconds += seconds


# Operators


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on CPU aliases of its tensors."""
    flat = [*_leaves(args), *_leaves(kwargs.values())]
    name = op._schema.name.removeprefix("aten::")
    if torch.Tag.data_dependent_output in op.tags:
        record(usage.HOST_READ, name)
        synchronize()
    else:
        record_operator(name)
    device_tensors = [x for x in flat if on_device(x)]
    for x in flat:
        if isinstance(x, Tensor) and not on_device(x) and device_tensors and (x.dim() or name in LOOKUPS):
            raise Rejected(
                f"{op}: a tensor of shape {tuple(x.shape)} on {x.device} among those on the device"
            )
        if isinstance(x, torch.Generator) and x.device.type != TYPE:
            raise Rejected(f"{op}: a generator on {x.device}")
    if name in INDEXING:
        dynamic = any(x.dtype == torch.bool for x in _leaves(args[1]) if on_device(x))
    else:
        dynamic = torch.Tag.dynamic_output_shape in op.tags and kwargs.get("output_size") is None
    if dynamic:
        record(usage.DYNAMIC, name)
    aliases: list[tuple[Tensor, Tensor]] = []  # with the tensors whose memory they are

    def to_host(x: Any) -> Any:
        if not on_device(x):
            return CPU if isinstance(x, torch.device) and x.type == TYPE else x
        resized = "out" in op._overloadname and not x.numel()
        aliases.append((torch.empty(0, dtype=x.dtype) if resized else host_alias(x), x))
        return aliases[-1][0]

    result = _call(op, _map(to_host, args), {key: _map(to_host, value) for key, value in kwargs.items()})
    for alias, x in aliases:
        if alias.numel() and not x.numel():
            aten.set_.source_Tensor.redispatch(CPU_KEY, x, device_alias(alias))
    own = {id(alias): x for alias, x in aliases}
    storages = {x.untyped_storage().data_ptr() for x in device_tensors if x.numel()}

    def from_host(y: Any) -> Any:
        if not isinstance(y, Tensor) or id(y) in own:
            return own.get(id(y), y)
        if y.numel() and y.untyped_storage().data_ptr() in storages:
            raise NotImplementedError(f"{op} returns a view, and the emulated device has no kernel for it")
        return device_alias(y)

    return _map(from_host, result)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What arguments have, also in lists."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """A value with this function of what it has; torch's pytrees take several times as long."""
    if isinstance(value, list | tuple):
        return type(value)(_map(function, each) for each in value)
    return function(value)


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if "to Tensor" not in str(error):
            raise
        # Boxed, a Python number stands where the schema has a tensor.
        args = tuple(
            torch.tensor(x) if isinstance(x, int | float) and str(argument.type) == "Tensor" else x
            for x, argument in zip(args, op._schema.arguments, strict=False)
        )
        return op(*args, **kwargs)


def _view(op: Any) -> Callable[..., Any]:
    """The CPU's kernel of an operator that only changes a tensor's sizes or storage, whatever its device."""
    return lambda *args, **kwargs: op.redispatch(CPU_KEY, *args, **kwargs)


def _factory(op: Any) -> Callable[..., Any]:
    """An operator that makes a tensor from none."""
    name = op._schema.name.removeprefix("aten::")

    def make(*args: Any, **kwargs: Any) -> Tensor:
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != TYPE:
            raise Rejected(f"{op}: a generator on {generator.device}")
        made = op(
            *args, **{**kwargs, "device": CPU, **({"pin_memory": None} if "pin_memory" in kwargs else {})}
        )
        if "empty" not in name:
            record_operator(name)
        return device_alias(fill_garbage(made) if "empty" in name and made.numel() else made)

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    copied = host_alias(source) if on_device(source) else source
    if on_device(target):
        if on_device(source):
            record_operator("copy_")
        else:
            usage.record_use()
            record(usage.UPLOAD, str(source.dtype))
            if not (non_blocking and _is_page_locked(source)):
                record(usage.BLOCKING_UPLOAD, str(source.dtype))
        host_alias(target).copy_(copied)
        return target
    if not source.is_contiguous() or source.dtype != target.dtype:  # is first copied on the device
        record_operator("copy_")
    if non_blocking and _is_page_locked(target):
        record(usage.DOWNLOAD)
        _copies.append((copied.clone(), target))
        fill_garbage(target)
    else:
        record(usage.HOST_READ, "copy")
        synchronize()
        target.copy_(copied)
    return target


def _to_copy(
    self: Tensor,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    non_blocking=False,
    memory_format=None,
) -> Tensor:
    """torch's own asks for pinned memory, which a device in Python cannot provide."""
    form = memory_format or torch.preserve_format
    out = torch.empty_like(self, dtype=dtype, device=device or self.device, memory_format=form)
    return out.copy_(self, non_blocking)


def _resize(self: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    grown = torch.empty(tuple(size), dtype=self.dtype)
    if (grown.numel() + self.storage_offset()) * self.element_size() > self.untyped_storage().nbytes():
        fill_garbage(grown).view(-1)[: self.numel()] = host_alias(self).flatten()
        return aten.set_.source_Tensor.redispatch(CPU_KEY, self, device_alias(grown))
    return aten.resize_.default.redispatch(CPU_KEY, self, size, memory_format=memory_format)


VIEWS = (
    *("as_strided", "view", "_reshape_alias", "unfold", "set_"),
    *("set_.source_Storage_storage_offset", "set_.source_Tensor", "set_.source_Storage"),
)


def _find(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _register_operators() -> None:
    everything, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    own = {
        "_copy_from": _copy_from,
        "_copy_from_and_resize": _copy_from,
        "_to_copy": _to_copy,
        "resize_": _resize,
    }
    own |= {name: _view(_find(name)) for name in VIEWS}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and _makes_tensor_from_none(name[6:]):
            own[name[6:]] = _factory(_find(name[6:]))
    for name, kernel in own.items():
        kernels.impl(name, kernel, "PrivateUse1")
    _libraries.extend((everything, kernels))


def _makes_tensor_from_none(name: str) -> bool:
    if any(part in name for part in ("sparse", "quantized", "from_file", "nested", "_dim_arange")):
        return False
    try:
        schema = _find(name)._schema
    except (AttributeError, RuntimeError):  # internal
        return False
    if not any(argument.name == "device" for argument in schema.arguments):
        return False
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor" and not takes_tensors


# The module torch.neuron


class Event:
    """A point in the device's work; operators complete on return, but the host must not rely on it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed, self._time = enable_timing, 0.0

    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter() + _queued_seconds

    def synchronize(self) -> None:
        record(usage.HOST_READ, "event")
        usage.order.append("wait")
        synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1000 * (end._time - self._time)


class Stream:
    """The device's only stream."""

    device_type = 20  # PrivateUse1

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = object.__hash__

    def synchronize(self) -> None:
        _waiting("stream")

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = record_event = wait_stream


def _waiting(what: str = "device") -> None:
    usage.record_use()
    record(usage.HOST_READ, what)
    synchronize()


class Module:
    """torch.neuron, as far as torch and the trainer use it."""

    __name__ = "emulated"
    Event, Stream = Event, Stream
    is_initialized = is_available = staticmethod(lambda: usage.present)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: int(usage.present))
    set_device = manual_seed = manual_seed_all = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    current_stream = default_stream = staticmethod(lambda *_: Stream())
    stream = staticmethod(lambda *_: contextlib.nullcontext())

    def __init__(self) -> None:
        self._random_state = torch.get_rng_state()

    @staticmethod
    def current_device() -> int:
        if not usage.present:
            raise Rejected("this machine has no device")
        return 0

    @staticmethod
    def synchronize(*_: Any) -> None:
        _waiting()

    def get_rng_state(self, *_: Any) -> Tensor:
        return self._random_state.clone()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        if state.device.type != "cpu":
            raise Rejected("the state of a random generator is bytes on the host")
        self._random_state = state.clone()


def _empty_like(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty_like(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = function(*args, **kwargs)
        return lock_pages(made) if pin_memory else made

    return empty_like


def install() -> None:
    """Make the device and its process-group backend; once in a process, before either is used."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from parallel import device
    from tests.emulation.process_group import register_backend

    _setup_privateuseone_for_python_backend(TYPE, backend_module=Module())
    torch.accelerator.synchronize = Module.synchronize  # torch's own does nothing for a device in Python
    # One device a process, whatever its rank.
    torch.accelerator.set_device_index = lambda index, /: usage.record_choice()
    device.KINDS[TYPE] = replace(
        device.KINDS[TYPE], page_locks=True
    )  # as a GPU, so that its copies are seen here
    torch.Tensor.pin_memory = lambda self: lock_pages(self.clone())
    torch.empty_like = _empty_like(torch.empty_like)
    _register_operators()
    register_backend()
