"""Compare our models with transformers' on the same random weights: logits, loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from modeling.models import families
from modeling.models.families import model_class
from parallel import Mesh
from parallel.layout import Box, layout_of
from parallel.logits import full_logits
from profiles.huggingface.config import from_config_json
from profiles.sections.model import Model

TOKENS = 24
TOLERANCE = 1e-5


def boxes(model: torch.nn.Module) -> list[tuple[torch.nn.Parameter, Box]]:
    """Every global tensor of a model on one process, as a box of its parameter."""
    return [
        (parameter, box)
        for name, parameter in model.named_parameters()
        for box in layout_of(parameter).boxes(name, 0)
    ]


def to_our_names(model: Model, names: list[str], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face tensors, named as in a model or in its files, under our names."""
    tensors = as_stored(model.architecture, tensors)
    stored = {name: families.huggingface_tensor(model, name) for name in names}
    return {name: where.read(tensors[where.name]) for name, where in stored.items()}


def as_stored(architecture: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors as stored in files: one per expert, where transformers fuses experts in memory."""
    if architecture == "gpt_neox":  # whose head is called lm_head in memory
        return {name.replace("lm_head", "embed_out"): tensor for name, tensor in tensors.items()}
    if architecture == "olmo_hybrid":
        return as_stored_by_olmo_hybrid(tensors)
    layer = {
        "mixtral": "block_sparse_moe", **dict.fromkeys(("qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_next"), "mlp"),
    }.get(architecture)  # fmt: skip
    if layer is None:
        return tensors
    gate, up, down = (
        ("w1", "w3", "w2") if architecture == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    stored = {}
    for name, tensor in tensors.items():
        prefix, expert, projection = name.rpartition(".mlp.experts.")
        if not expert:
            stored[name.replace(".mlp.", f".{layer}.")] = tensor
            continue
        for number, own in enumerate(tensor):
            parts = (
                {down: own}
                if "gate_up" not in projection
                else dict(zip((gate, up), own.chunk(2), strict=True))
            )
            for part, weight in parts.items():
                stored[f"{prefix}.{layer}.experts.{number}.{part}.weight"] = weight
    return stored


OWN_NAMES = ("num_mtp_layers", "mtp_layer_types")  # of transformers' `MtpModel`, in no published config.json
QWEN_MODULE = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}


def module_tensors(tensors: dict[str, torch.Tensor], config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Tensors of transformers' `MtpModel` as in files: of a layer after the last, or of Qwen's `mtp`."""
    stored = {}
    for name, tensor in tensors.items():
        if not name.startswith("layers."):
            continue
        _, number, rest = name.split(".", 2)
        if config.model_type.startswith("qwen3"):
            kind = rest.partition(".")[0]
            own = rest.replace(kind, QWEN_MODULE[kind]) if kind in QWEN_MODULE else f"layers.{number}.{rest}"
            stored[f"mtp.{own.replace('mtp_block.', '')}"] = tensor
        else:
            rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            stored[f"model.layers.{config.num_hidden_layers + int(number)}.{rest}"] = tensor
    return stored


def as_stored_by_olmo_hybrid(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One filter each for queries, keys and values, and layers' norms under the published names."""
    stored = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".linear_attn.conv1d")
        if rest:
            key = len(tensors[f"{layer}.linear_attn.q_proj.weight"])
            for part, rows in zip("qkv", tensor.split((key, key, len(tensor) - 2 * key)), strict=True):
                stored[f"{layer}.linear_attn.{part}_conv1d.weight"] = rows
            continue
        layer = name.removesuffix(".input_layernorm.weight").removesuffix(".post_attention_layernorm.weight")
        if layer != name and f"{layer}.linear_attn.A_log" in tensors:
            kind = "attention" if "input_layernorm" in name else "feedforward"
            name = f"{layer}.{kind}_layer_norm.weight"
        stored[name] = tensor
    return stored


def build_pair(
    kind: Callable[[PretrainedConfig], PreTrainedModel], config: PretrainedConfig
) -> tuple[PreTrainedModel, torch.nn.Module, Model]:
    """transformers' model with random weights, biases and norms, ours with the same, and its `Model`.

    With multi-token prediction, its modules are an attribute of transformers' model, `mtp`.
    """
    torch.manual_seed(0)
    theirs = kind(config)
    if getattr(config, "num_mtp_layers", 0):
        theirs.mtp = MtpModel(theirs, config.num_mtp_layers)
        for parameter in theirs.mtp.layers.parameters():  # which it leaves uninitialized
            if parameter.dim() == 1:
                torch.nn.init.ones_(parameter)
            else:
                torch.nn.init.normal_(parameter, std=config.initializer_range)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("A_log"):
                parameter.uniform_(-5, -1)  # strong decays are rounded more in transformers
            elif parameter.dim() == 1:  # of a norm
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    published = {name: value for name, value in config.to_dict().items() if name not in OWN_NAMES}
    description = Model(**from_config_json(published))
    ours = model_class(description.architecture)(description, Mesh())
    names = [box.name for _, box in boxes(ours)]
    tensors = theirs.state_dict()
    if description.prediction_layers:
        tensors |= module_tensors(theirs.mtp.state_dict(), config)
    weights = to_our_names(description, names, tensors)
    with torch.no_grad():
        for parameter, box in boxes(ours):
            box.view(parameter).copy_(weights[box.name])
    return theirs, ours, description


def assert_match(
    kind: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    lengths: Sequence[int] = (TOKENS,),
) -> None:
    """Assert that we have all their weights, and that logits, loss and the gradient of each agree."""
    theirs, ours, description = build_pair(kind, config)
    stored = as_stored(description.architecture, dict(theirs.named_parameters()))
    mapped = {families.huggingface_tensor(description, box.name).name for _, box in boxes(ours)}
    assert stored.keys() <= mapped
    for length in lengths:
        theirs.zero_grad()
        ours.zero_grad()
        _assert_match(theirs, ours, description, torch.randint(0, config.vocab_size, (2, length)))


def _assert_match(
    theirs: PreTrainedModel, ours: torch.nn.Module, description: Model, tokens: torch.Tensor
) -> None:
    length = tokens.shape[1]
    expected = theirs(tokens, labels=tokens)

    hidden = ours(tokens, torch.arange(length))
    logits = full_logits(**ours.logits_arguments(hidden)).view_as(expected.logits)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=TOLERANCE)
    if length == 1:  # no token has a target
        return

    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    loss = ours.loss(hidden, targets) / (targets != -100).sum()
    torch.testing.assert_close(loss, expected.loss, rtol=TOLERANCE, atol=0)

    loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    trained = [(parameter, box) for parameter, box in boxes(ours) if layout_of(parameter).sign_step is None]
    gradients = to_our_names(description, [box.name for _, box in trained], gradients)
    # Rounding is that of sums of larger gradients: a key bias without rotation, for one, has a gradient of exactly zero.
    least = 0.01 * torch.stack([gradients[box.name].norm() for _, box in trained]).norm()
    for parameter, box in trained:
        difference = (box.view(parameter.grad) - gradients[box.name]).norm()
        scale = max(gradients[box.name].norm(), least)
        assert difference <= TOLERANCE * scale, f"{box.name}: {difference:.2e} of {scale:.2e}"
