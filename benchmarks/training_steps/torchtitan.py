"""torchtitan's Llama 3 on one device, compiled block by block; needs torchtitan 0.3.0 and triton.

As in torchtitan's trainer on one device, FSDP2 of one rank casts float32 parameters to bf16, and AdamW is fused. Samples are one
document each, so attention is torch's `scaled_dot_product_attention`, which needs no mask.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, Llama3TransformerBlock, parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from benchmarks.harness import workload
from profiles.sections.model import Model

PRECISIONS = {"float32": "float32", "bf16": "bfloat16"}


def main() -> None:
    options, work, _, _ = workload.start(workload.workload_parser(__doc__))
    settings = make_settings(work.model)
    with torch.device(options.device):
        model = Llama3Model(settings)
    weights = workload.huggingface_weights(work.model, options.device)
    model.load_state_dict(Llama3StateDictAdapter(settings, None).from_hf(weights))
    dist.init_process_group(workload.BACKENDS[options.device], store=dist.HashStore(), rank=0, world_size=1)
    parallel_dims.device_type = options.device  # on a machine without a GPU, cuda too
    parallelism = ParallelismConfig()
    parallelize_llama(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        training=TrainingConfig(mixed_precision_param=PRECISIONS[options.precision]),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=bool(options.graphs)),
        ac_config=None,
        dump_folder="",
    )
    loss_function = torch.compile(cross_entropy_loss) if options.graphs else cross_entropy_loss

    def compute_loss(samples: Tensor) -> Tensor:
        samples = samples.to(options.device)
        return loss_function(model(samples[:, :-1]), samples[:, 1:]) / work.tokens

    optimizer = workload.adamw(model.parameters(), fused=True)
    workload.measure_training(model, optimizer, compute_loss, options)


def make_settings(model: Model) -> Llama3Model.Config:
    """torchtitan's settings."""
    rope = ComplexRoPE.Config(
        dim=model.hidden_size // model.num_attention_heads,
        max_seq_len=model.max_position_embeddings,
        theta=model.rope_theta,
    )
    norm = RMSNorm.Config(normalized_shape=model.hidden_size, eps=model.norm_eps)
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=make_gqa_config(
            dim=model.hidden_size,
            n_heads=model.num_attention_heads,
            n_kv_heads=model.num_key_value_heads,
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            rope=rope,
        ),
        feed_forward=make_ffn_config(
            dim=model.hidden_size, hidden_dim=model.intermediate_size, w1_param_init={}, w2w3_param_init={}
        ),
    )
    return Llama3Model.Config(
        dim=model.hidden_size,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=model.vocab_size, embedding_dim=model.hidden_size),
        norm=norm,
        lm_head=Linear.Config(in_features=model.hidden_size, out_features=model.vocab_size),
        layers=[layer] * model.num_hidden_layers,
    )


if __name__ == "__main__":
    main()
