"""All private torch names that the tree uses: the only ones to check for another version of torch.

The rest of the tree imports them from here, under our own names: `from parallel.torch_internals import fused_adamw`. Each is
looked up at its first import, because some of their modules take seconds to import. They are the same in all VERSIONS of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from inspect import getclosurevars, isfunction
from typing import TYPE_CHECKING, Any

from torch import library

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

VERSIONS = ("2.13", "2.14")  # that Trainshed supports
NAMES = {
    # Collectives that torch.compile traces, and groups by name
    "all_gather_into_tensor": "torch.ops._c10d_functional.all_gather_into_tensor",
    "all_gather_into_tensor_out": "torch.ops._c10d_functional.all_gather_into_tensor_out",
    "all_reduce": "torch.ops._c10d_functional.all_reduce",
    "all_to_all_single": "torch.ops._c10d_functional.all_to_all_single",
    "reduce_scatter_tensor": "torch.ops._c10d_functional.reduce_scatter_tensor",
    "wait_tensor": "torch.ops._c10d_functional.wait_tensor",
    "functional_collectives": "torch.distributed._functional_collectives",  # registers their meta implementations
    "enable_symmetric_memory": "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
    "register_process_group": "torch._C._distributed_c10d._register_process_group",
    "resolve_process_group": "torch._C._distributed_c10d._resolve_process_group",
    "unregister_process_group": "torch._C._distributed_c10d._unregister_process_group",
    "distributed_c10d": "torch._C._distributed_c10d",
    # Kernels
    "fused_adamw": "torch._fused_adamw_",
    "fused_rms_norm": "torch.ops.aten._fused_rms_norm",
    "linear_pointwise": "torch.ops.mkldnn._linear_pointwise.default",  # oneDNN's product; no autograd
    "scaled_mm": "torch.ops.aten._scaled_mm_v2",
    "has_bf16_products": "torch.cpu._is_avx512_bf16_supported",
    "cpu_flash_attention": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "cpu_flash_attention_backward": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "cudnn_attention": "torch.ops.aten._scaled_dot_product_cudnn_attention",
    "efficient_attention": "torch.ops.aten._scaled_dot_product_efficient_attention",
    "efficient_attention_backward": "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
    "flash_attention": "torch.ops.aten._scaled_dot_product_flash_attention",
    "flash_attention_backward": "torch.ops.aten._scaled_dot_product_flash_attention_backward",
    # Autograd and dispatch
    "will_engine_execute_node": "torch._C._will_engine_execute_node",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map": "torch.utils._pytree.tree_map",
    "OpOverload": "torch._ops.OpOverload",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor.unset_fake_temporarily",
    # Pipelines
    "Action": "torch.distributed.pipelining.schedules._Action",
    "ComputationType": "torch.distributed.pipelining.schedules._ComputationType",
    "PipelineScheduleRuntime": "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "RecvInfo": "torch.distributed.pipelining.stage._RecvInfo",
    "is_in_bad_fork": "torch.cuda._is_in_bad_fork",
    # Checkpoints
    "PyTorchFileReader": "torch._C.PyTorchFileReader",
    "narrow_tensor_by_index": "torch.distributed._shard._utils.narrow_tensor_by_index",
    "FileSystem": "torch.distributed.checkpoint._fsspec_filesystem.FileSystem",
    "FsspecWriter": "torch.distributed.checkpoint._fsspec_filesystem.FsspecWriter",
    "StorageInfo": "torch.distributed.checkpoint.filesystem._StorageInfo",
    "StoragePrefix": "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "create_file_view": "torch.distributed.checkpoint.utils._create_file_view",
    # Compilers and tracing
    "aot_autograd": "torch._dynamo.backends.common.aot_autograd",
    "lookup_backend": "torch._dynamo.backends.registry.lookup_backend",
    "counters": "torch._dynamo.utils.counters",
    "functorch_config": "torch._functorch.config",
    "partitioners": "torch._functorch.partitioners",  # its has_recomputable_rng_ops is replaced
    "compile_fx": "torch._inductor.compile_fx.compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx.compile_fx_inner",
    "CustomGraphPass": "torch._inductor.custom_graph_pass.CustomGraphPass",
    "inductor_config": "torch._inductor.config",
    "pick_vec_isa": "torch._inductor.cpu_vec_isa.pick_vec_isa",
    "FakeStore": "torch.testing._internal.distributed.fake_pg.FakeStore",
}
ATTRIBUTES = {
    # Private attributes and methods that the tree reads or overrides, with the class or module of torch that has them
    "_backend_fns": "torch._library.custom_ops.CustomOpDef",
    "_cdata": "torch.UntypedStorage",
    "_checkpoint_offset": "torch.serialization",
    "_device_types": "torch.distributed.ProcessGroup",
    "_get_backend": "torch.distributed.ProcessGroup",
    "_overloadpacket": "torch._ops.OpOverload",
    "_parameters": "torch.nn.Module",
    "_schema": "torch._ops.OpOverload",
    "_n_microbatches": "torch.distributed.pipelining.schedules.PipelineScheduleMulti",
    "_prepare_schedule_with_comms": "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "_create_grad_recv_info": "torch.distributed.pipelining.PipelineStage",
    "_get_recv_ops": "torch.distributed.pipelining.PipelineStage",
    "_retrieve_recv_activations": "torch.distributed.pipelining.PipelineStage",
    "_retrieve_recv_grads": "torch.distributed.pipelining.PipelineStage",
    "_setup_forward_recv_info": "torch.distributed.pipelining.PipelineStage",
    "_warmup_backward_result": "torch.distributed.pipelining.PipelineStage",
    "_warmup_forward_vote": "torch.distributed.pipelining.PipelineStage",
    "_start": "torch.distributed.elastic.multiprocessing.SubprocessContext",
}
DISABLED = "__dynamo_disable"  # attribute of a function: the same with Dynamo disabled
WRAP_LOGGER = "torch._higher_order_ops.wrap"  # name of a logger


def custom_op(
    name: str, schema: str | None = None, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """As torch.library.custom_op, but does not import Dynamo in a process that compiles nothing.

    torch disables Dynamo around the kernel, and takes half a second to import it at the first call, even if nothing else does.

    Args:
        schema: arguments and results, of a function that takes arguments together; None: those of its annotations.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        operator = library.custom_op(name, function, mutates_args=mutates_args, schema=schema)
        for run in operator._backend_fns.values():
            _defer_dynamo(run)
        return operator

    return define


def defer_dynamo_on_meta() -> None:
    """As custom_op, for operators on the meta device: those in Python would import Dynamo, too."""
    disabled = find("torch._disable_dynamo")(_defer_dynamo).__code__  # that of every function without Dynamo
    tables = find("torch._decomp.global_decomposition_table").values()
    waiting = [function for operators in tables for function in operators.values() if isfunction(function)]
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        if function.__code__ is disabled:
            _defer_dynamo(function)
        wrapped = {
            cell.cell_contents for cell in function.__closure__ or () if isfunction(cell.cell_contents)
        }
        waiting += wrapped - seen
        seen |= wrapped


def _defer_dynamo(run: Callable[..., Any]) -> None:
    """Let a function around which torch disables Dynamo not import it."""
    kernel = getclosurevars(run).nonlocals["fn"]
    # What torch would run with Dynamo disabled, once it has imported it.
    setattr(kernel, DISABLED, partial(_without_dynamo, run, kernel))


def _without_dynamo(run: Callable[..., Any], kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "torch._dynamo" not in sys.modules:
        return kernel(*args, **kwargs)
    vars(kernel).pop(DISABLED, None)
    return run(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = find(NAMES[name])
    return found


def find(path: str) -> Any:
    """The object with a dotted path, importing the modules on the way."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
            break
        except ModuleNotFoundError:
            continue
    for part in parts[end:]:
        found = getattr(found, part)
    return found
