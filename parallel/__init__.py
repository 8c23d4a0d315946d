"""How a model is spread: mesh, collectives, layers, attention, loss, ZeRO-1, checkpoints. Knows only torch."""

from parallel.attention.attention import attention
from parallel.attention.ring import ring_attention
from parallel.gqa import GQAQKVColumnParallelLinear
from parallel.initialization import Constant, Normal, initialize
from parallel.layers import (
    ColumnParallelLinear,
    Embedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from parallel.layout import Layout, Section, parameter, parameter_count
from parallel.loss import linear_cross_entropy, vocab_parallel_cross_entropy
from parallel.mesh import Axis, Mesh
from parallel.norms import LayerNorm, RMSNorm
from parallel.optimizer.zero1 import ZeRO1

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "Constant",
    "Embedding",
    "GQAQKVColumnParallelLinear",
    "LayerNorm",
    "Layout",
    "Mesh",
    "Normal",
    "RMSNorm",
    "RowParallelLinear",
    "Section",
    "VocabParallelEmbedding",
    "ZeRO1",
    "attention",
    "initialize",
    "linear_cross_entropy",
    "parameter",
    "parameter_count",
    "ring_attention",
    "vocab_parallel_cross_entropy",
]
