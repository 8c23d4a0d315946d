"""torchtitan's Llama 3 on one device, compiled block by block; needs torchtitan 0.2.2 and triton.

As in torchtitan's trainer on one device, parameters are in float32, matrix products in bf16 by autocast, and AdamW is fused.
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config.job_config import Compile
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import apply_compile
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from benchmarks.harness import workload
from profiles.sections.model import Model


def main() -> None:
    options, work, _, _ = workload.start(workload.workload_parser(__doc__))
    settings = make_settings(work.model)
    with torch.device(options.device):
        model = Transformer(settings)
    if work.model.tie_word_embeddings:
        model.output.weight = model.tok_embeddings.weight
    weights = workload.huggingface_weights(work.model, options.device)
    loaded = Llama3StateDictAdapter(settings, None).from_hf(weights)
    missing = model.load_state_dict(loaded, strict=not work.model.tie_word_embeddings).missing_keys
    assert missing in ([], ["output.weight"]), f"parameters without initial weights: {', '.join(missing)}"
    loss_function = cross_entropy_loss
    if options.graphs:
        apply_compile(model, Compile(enable=True))
        loss_function = torch.compile(loss_function)
    low = options.precision == "bf16"

    def compute_loss(samples: Tensor) -> Tensor:
        samples = samples.to(options.device)
        with torch.autocast(options.device, torch.bfloat16) if low else nullcontext():
            return loss_function(model(samples[:, :-1]), samples[:, 1:]) / work.tokens

    optimizer = workload.adamw(model.parameters(), fused=True)
    workload.measure_training(model, optimizer, compute_loss, options)


def make_settings(model: Model) -> TransformerModelArgs:
    """torchtitan's settings; its MLP width is 8/3 of the hidden size times a factor, rounded down."""
    return TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_hidden_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        vocab_size=model.vocab_size,
        multiple_of=1,
        ffn_dim_multiplier=(model.intermediate_size + 0.5) / int(8 * model.hidden_size / 3),
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=model.max_position_embeddings,
    )


if __name__ == "__main__":
    main()
