"""Parallelism: mesh, devices, collectives, layers, attention, pipeline, ZeRO-1, FSDP, checkpoints.

Start with `mesh` (process groups) and `layout` (how each parameter is sharded), then `layers`. `device` has the figures of each
accelerator. Imports nothing else of this project.

The names below are imported on first use, so that profile validation can import `parallel.constraints` without torch.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "attention.ring": ("ring_attention",),
    "layers.gqa": ("GQAQKVColumnParallelLinear",),
    "initialization": ("Constant", "Normal", "initialize"),
    "layers.linear": ("ColumnParallelLinear", "Embedding", "RowParallelLinear", "VocabParallelEmbedding"),
    "layout": ("Layout", "Section", "parameter", "parameter_count"),
    "loss": ("linear_cross_entropy",),
    "mesh": ("Axis", "Mesh"),
    "layers.norms": ("LayerNorm", "RMSNorm"),
    "optimizer.sharded_adamw": ("ShardedAdamW",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
