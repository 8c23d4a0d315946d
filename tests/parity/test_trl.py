"""Fine-tuning against TRL and PEFT: same model and records, equal loss and gradients, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from modeling.conversion import formats
from modeling.conversion.adapters import peft, peft_experts
from modeling.conversion.adapters.trained import TrainedAdapters
from modeling.conversion.convert import Options, convert
from modeling.conversion.formats import read_adapters
from modeling.data.records import open_samples
from modeling.models.families import huggingface_tensor
from modeling.training.reference import log_probabilities
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import initialize
from parallel.checkpoint import checkpoint
from parallel.logits import full_logits
from profiles.huggingface.config import from_config_json
from profiles.schema import Profile
from profiles.sections.model import Model
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tests.modeling.models.families.huggingface import boxes, to_our_names

S, TOLERANCE = 48, 1e-5
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 258, "max_position_embeddings": S, "initializer_range": 0.2,
}  # fmt: skip
WORDS = ["sum", "of two", "numbers", "is", "a longer answer with more words", "no", "yes, it is"]
RECORDS = [
    {"prompt": f"{WORDS[i % 7]}? ", "completion": WORDS[(3 * i + 1) % 7], "chosen": WORDS[(3 * i + 1) % 7],
     "rejected": WORDS[(5 * i + 2) % 7]}
    for i in range(6)
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A model and a tokenizer of transformers, and a Trainshed store with the records."""
    folder = tmp_path_factory.mktemp("trl")
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<pad>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    model.save_pretrained(folder / "model")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    description = Model(**from_config_json(config.to_dict()))
    return SimpleNamespace(
        description=description,
        folder=folder,
        tokenizer=fast,
        model=model,
        weights=weights,
        store=Store(str(folder / "store")),
    )


def profile(theirs, **sections) -> Profile:
    """A profile for one process whose single step trains on all records."""
    sections = {"objective": {"kind": "sft", "packing": False}, **sections}
    source = {"kind": "files", "path": str(theirs.folder / "records.jsonl")}
    return Profile.model_validate(
        {
            "name": "parity",
            "model": from_config_json(theirs.model.config.to_dict()),
            "tokenizer": {"source": str(theirs.folder / "tokenizer")},
            "data": {"sources": [{**source, "use": "train"}, {**source, "use": "validation"}]},
            "train": {
                "steps": 1, "global_batch_size": len(RECORDS), "micro_batch_size": 2, "sequence_length": S,
                "learning_rate": 1e-3, "precision": "float32", "balance": "none",
            },
            "compile": {"enabled": False},
            "cluster": {"device": "cpu", "threads": 1},
            **sections,
        }
    )  # fmt: skip


def ours(
    theirs, wanted: Profile, adapters=None, saved: Path | None = None, reference=None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients (by our names) of one trainer step on the records, through the dataset step.

    Args:
        adapters: the factors of LoRA by our names.
        saved: folder to write them to, as a checkpoint.
        reference: weights of the reference model, by their names.
    """
    context = Context(wanted, theirs.store)
    dataset = DatasetStep(TokenizerStep().run(context)).run(context)
    samples = open_samples(wanted, theirs.store.artifacts.path(dataset), "train", ordered=True)
    with Trainer(wanted) as trainer:
        model = trainer.stages[0]
        initialize(model.named_parameters(), trainer.mesh.tensor, 0)

        def load(weights) -> None:
            names = [box.name for _, box in boxes(model) if ".lora." not in box.name]
            weights = to_our_names(theirs.description, names, weights) | (adapters or {})
            with torch.no_grad():
                for parameter, box in boxes(model):
                    box.view(parameter).copy_(weights[box.name])

        if reference:
            load(reference)
            samples.reference = log_probabilities(trainer, samples)
        load(theirs.weights)
        count = samples.windows
        batch = trainer.read_batch(samples, 0, count)
        assert not wanted.packs or count < len(RECORDS)
        orpo = wanted.objective.kind == "orpo"
        pairs = {"pairs_per_token": samples.pairs_per_token(0, count) if orpo else 0.0}
        loss = trainer.forward_backward(batch, 1 / samples.count_targets(0, count), **pairs)
        total, evaluated, *_ = trainer.evaluate(batch, len(batch.tokens), **pairs).tolist()
        assert (round(total), evaluated / total) == (
            samples.count_targets(0, count),
            pytest.approx(loss.item(), rel=1e-5),
        )
        trained = [(parameter, box) for parameter, box in boxes(model) if parameter.requires_grad]
        gradients = {box.name: box.view(parameter.grad).clone() for parameter, box in trained}
        if saved:
            checkpoint.save(saved, make_optimizer(trainer), {"profile": wanted.model_dump(mode="json")})
        return loss.item(), gradients


def assert_equal(theirs, found: tuple[float, dict[str, torch.Tensor]], loss: torch.Tensor, gradients) -> None:
    """Assert that a loss and gradients equal theirs, which have their names."""
    assert found[0] == pytest.approx(loss.item(), rel=TOLERANCE)
    for name, expected in to_our_names(theirs.description, list(found[1]), gradients).items():
        assert (found[1][name] - expected).norm() <= TOLERANCE * expected.norm(), name


def settings(kind, folder: Path, **more):
    """Arguments of one of TRL's trainers whose batch is all records."""
    return kind(
        output_dir=str(folder / "trl"), per_device_train_batch_size=len(RECORDS), max_length=S, use_cpu=True, bf16=False,
        report_to="none", gradient_checkpointing=False, **more,
    )  # fmt: skip


def step(trainer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the first batch of one of TRL's trainers."""
    trainer.model.zero_grad()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


def test_sft_equals_trl_padded_and_packed(theirs):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    records = Dataset.from_list([{name: each[name] for name in ("prompt", "completion")} for each in RECORDS])
    arguments = settings(SFTConfig, theirs.folder)
    trainer = SFTTrainer(base(theirs), arguments, train_dataset=records, processing_class=theirs.tokenizer)
    expected = step(trainer)
    for packing in (False, True):
        found = ours(theirs, profile(theirs, objective={"kind": "sft", "packing": packing}))
        assert_equal(theirs, found, *expected)


def pairs():
    from datasets import Dataset

    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list([{name: each[name] for name in names} for each in RECORDS])


def base(theirs) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(theirs.folder / "model")


# TRL has no smoothed sigmoid loss, but its terms: s = -log σ(βΔ), and r = ((1 - ε) s + ε log σ(-βΔ)) / (1 - 2ε).
# (1 - ε) s - ε log σ(-βΔ) = 2 (1 - ε) s - (1 - 2ε) r
SMOOTHED = {"loss_type": ["sigmoid", "robust"], "loss_weights": [1.6, -0.6], "label_smoothing": 0.2}


@pytest.mark.parametrize("loss", ["sigmoid", "smoothed", "hinge", "ipo"])
def test_dpo_equals_trl(theirs, loss):
    from trl import DPOConfig, DPOTrainer

    kind = SMOOTHED if loss == "smoothed" else {"loss_type": loss}
    torch.manual_seed(2)
    reference = base(theirs)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    trainer = DPOTrainer(
        base(theirs),
        reference,
        settings(DPOConfig, theirs.folder, beta=0.3, disable_dropout=True, **kind),
        train_dataset=pairs(),
        processing_class=theirs.tokenizer,
    )
    ours_of = {"label_smoothing": 0.2} if loss == "smoothed" else {"loss": loss}
    expected = step(trainer)
    for packing in (False, True):
        wanted = profile(theirs, objective={"kind": "dpo", "beta": 0.3, "packing": packing, **ours_of})
        assert_equal(theirs, ours(theirs, wanted, reference=reference.state_dict()), *expected)


def test_orpo_equals_trl(theirs):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    arguments = settings(ORPOConfig, theirs.folder, beta=0.3, disable_dropout=True)
    trainer = ORPOTrainer(base(theirs), arguments, train_dataset=pairs(), processing_class=theirs.tokenizer)
    expected = step(trainer)
    for packing in (False, True):
        wanted = profile(theirs, objective={"kind": "orpo", "beta": 0.3, "packing": packing})
        assert_equal(theirs, ours(theirs, wanted), *expected)


# Our names of PEFT's factors; those of fused projections are stacked.
LORA = {
    "self_attn.q_proj": ("attention.qkv.lora", "q", 0),
    "self_attn.v_proj": ("attention.qkv.lora", "v", 1),
    "self_attn.o_proj": ("attention.output.lora", "", 0),
    "mlp.up_proj": ("mlp.gate_up.lora", "up", 0),
    "mlp.down_proj": ("mlp.down.lora", "", 0),
}
RANK, ALPHA = 4, 8.0


def factors_of(tensors, wanted: Profile) -> dict[str, torch.Tensor]:
    """PEFT's factors, or their gradients, by our names; B of a fused layer has a column block for each A."""
    found: dict[str, torch.Tensor] = {}
    sizes = {"q": 32, "k": 16, "v": 16, "gate": 64, "up": 64}
    for number in range(wanted.model.num_hidden_layers):
        for module, (layer, section, group) in LORA.items():
            theirs = f"base_model.model.model.layers.{number}.{module}.lora_"
            a, b = (tensors[f"{theirs}{letter}.default.weight"] for letter in "AB")
            prefix, dot = f"layers.{number}.{layer}", "." if section else ""
            found[f"{prefix}.a{dot}{section}.weight"] = a
            if not section:
                found[f"{prefix}.b.weight"] = b
                continue
            groups = 2 if "qkv" in layer else 1
            for name in ("q", "k", "v") if groups == 2 else ("gate", "up"):
                full = found.setdefault(f"{prefix}.b.{name}.weight", torch.zeros(sizes[name], groups * RANK))
                if name == section:
                    full[:, group * RANK : (group + 1) * RANK] = b
    return found


def assert_factors_equal(found, loss, expected) -> None:
    """Assert that a loss and the gradients of all factors, by our names, equal the expected."""
    assert found[0] == pytest.approx(loss.item(), rel=TOLERANCE)
    assert found[1].keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[1][name] - gradient).norm() <= TOLERANCE * gradient.norm(), name


def test_lora_equals_peft_and_is_exported_as_adapter_and_merged(theirs, tmp_path):
    from datasets import Dataset
    from peft import LoraConfig, PeftModel, get_peft_model
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(1)
    targets = [module.rpartition(".")[2] for module in LORA]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(base(theirs), config)
    records = Dataset.from_list([{name: each[name] for name in ("prompt", "completion")} for each in RECORDS])
    trainer = SFTTrainer(
        model, settings(SFTConfig, theirs.folder), train_dataset=records, processing_class=theirs.tokenizer
    )
    loss, gradients = step(trainer)

    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets}
    wanted = profile(theirs, lora=lora)
    adapters = factors_of({name: each.detach() for name, each in model.state_dict().items()}, wanted)
    found = ours(theirs, wanted, adapters, tmp_path / "saved")
    assert_factors_equal(found, loss, factors_of(gradients, wanted))

    saved = TrainedAdapters(tmp_path / "saved")
    peft.write(saved, tmp_path / "adapter")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits = model.eval()(tokens).logits
        loaded = PeftModel.from_pretrained(base(theirs), tmp_path / "adapter").eval()(tokens).logits
        torch.testing.assert_close(loaded, logits, rtol=0, atol=1e-6)
    merged = saved.merged(formats.read(theirs.folder / "model", None, None, True))
    for name, tensor in model.merge_and_unload().state_dict().items():
        ours_of = {huggingface_tensor(theirs.description, each).name: each for each in merged.shapes}
        found_tensor = merged.read(ours_of[name], (0,) * tensor.dim(), tuple(tensor.shape))
        torch.testing.assert_close(found_tensor, tensor, rtol=0, atol=1e-6)


def test_dpo_with_lora_uses_the_frozen_model_as_reference_like_trl(theirs):
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(3)
    targets = [module.rpartition(".")[2] for module in LORA]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False)
    arguments = settings(DPOConfig, theirs.folder, beta=0.3, disable_dropout=True)
    given = {"train_dataset": pairs(), "processing_class": theirs.tokenizer, "peft_config": config}
    trainer = DPOTrainer(base(theirs), args=arguments, **given)
    model, (loss, gradients) = trainer.model, step(trainer)
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets}
    objective = {"kind": "dpo", "beta": 0.3, "precompute_reference": False}
    wanted = profile(theirs, lora=lora, objective=objective)
    adapters = factors_of({name: each.detach() for name, each in model.state_dict().items()}, wanted)
    assert_factors_equal(ours(theirs, wanted, adapters), loss, factors_of(gradients, wanted))


def test_lora_of_gpt2_with_fused_weights_is_exported_as_adapter_and_merged(theirs, tmp_path):
    from peft import PeftModel
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=258, n_positions=S)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ["qkv", "output", "gate_up", "down"]}
    wanted = profile(theirs, model=from_config_json(config.to_dict()), lora=lora)
    with Trainer(wanted) as trainer:
        model = trainer.stages[0]
        initialize(model.named_parameters(), trainer.mesh.tensor, 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora.b." in name:
                    parameter.normal_(std=0.1)
        about = {"profile": wanted.model_dump(mode="json")}
        checkpoint.save(tmp_path / "saved", make_optimizer(trainer), about)
    convert(tmp_path / "base", tmp_path / "merged", Options("hf", adapters=tmp_path / "saved"))
    peft.write(TrainedAdapters(tmp_path / "saved"), tmp_path / "adapter")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        plain, merged = (
            GPT2LMHeadModel.from_pretrained(tmp_path / name).eval() for name in ("base", "merged")
        )
        expected = merged(tokens).logits
        assert (plain(tokens).logits - expected).abs().max() > 1e-2
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(tokens).logits
    torch.testing.assert_close(loaded, expected, rtol=0, atol=1e-6)
    again = {factors.tensor: factors for factors in read_adapters(tmp_path / "adapter", tmp_path / "base")}
    for factors in TrainedAdapters(tmp_path / "saved"):
        read = again.pop(factors.tensor)
        assert torch.equal(read.a, factors.a)
        assert torch.equal(read.b, factors.b)
        assert read.scale == factors.scale
    assert not again


EXPERTS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager"
        ),
    ),
}


def expert_factors_of(tensors, wanted: Profile) -> dict[str, torch.Tensor]:
    """PEFT's factors of experts and of attention's output, or their gradients, by our names."""
    tensors = {
        name.removeprefix("base_model.model.").replace(".default.", "."): each
        for name, each in tensors.items()
    }
    found = {}
    for number in range(wanted.model.num_hidden_layers):
        for letter in "AB":
            name = f"layers.{number}.self_attn.o_proj.lora_{letter}.weight"
            found[f"layers.{number}.attention.output.lora.{letter.lower()}.weight"] = tensors[f"model.{name}"]
    parameters = [*peft_experts.PARAMETERS.values()]
    for name, a, b, _ in peft_experts.unstacked(wanted.model, tensors, RANK, parameters):
        layer, projection, expert, half = peft_experts.EXPERT.fullmatch(name).groups()
        prefix = f"layers.{layer}.mlp.{projection}.lora"
        found[f"{prefix}.a.{expert}.weight"] = a
        found[f"{prefix}.b.{expert}{f'.{half}' if half else ''}.weight"] = b
    return found


@pytest.mark.parametrize("family", EXPERTS)
def test_lora_of_experts_equals_peft_and_is_exported_as_adapter_and_merged(theirs, tmp_path, family):
    from datasets import Dataset
    from peft import LoraConfig, PeftModel, get_peft_model
    from trl import SFTConfig, SFTTrainer

    kind, config = EXPERTS[family]
    torch.manual_seed(4)
    plain = kind(config)
    plain.save_pretrained(tmp_path / "base")
    given = {
        **vars(theirs),
        "model": plain,
        "weights": {name: each.clone() for name, each in plain.state_dict().items()},
    }
    mixture = SimpleNamespace(**given | {"description": Model(**from_config_json(config.to_dict()))})
    targets = {"target_modules": ["o_proj"], "target_parameters": [*peft_experts.PARAMETERS.values()]}
    model = get_peft_model(plain, LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights=False, **targets))
    records = Dataset.from_list([{name: each[name] for name in ("prompt", "completion")} for each in RECORDS])
    arguments = settings(SFTConfig, tmp_path, router_aux_loss_coef=0.0)
    trainer = SFTTrainer(model, arguments, train_dataset=records, processing_class=theirs.tokenizer)
    loss, gradients = step(trainer)

    lora = {"rank": RANK, "alpha": ALPHA, "targets": ["output", "gate_up", "down"]}
    wanted = profile(mixture, lora=lora)
    trained = {name: each.detach().clone() for name, each in model.named_parameters()}
    found = ours(mixture, wanted, expert_factors_of(trained, wanted), tmp_path / "saved")
    assert_factors_equal(found, loss, expert_factors_of(gradients, wanted))

    saved = TrainedAdapters(tmp_path / "saved")
    peft.write(saved, tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "merged", Options("hf", adapters=tmp_path / "adapter"))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits = model.eval()(tokens).logits
        loaded = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        torch.testing.assert_close(loaded.eval()(tokens).logits, logits, rtol=0, atol=1e-6)
        merged = kind.from_pretrained(tmp_path / "merged").eval()(tokens).logits
        torch.testing.assert_close(merged, logits, rtol=0, atol=1e-5)


def test_lora_of_shared_experts_and_latent_attention_is_exported_only_merged(theirs, tmp_path):
    """PEFT mistakes the projections of deepseek_v3's shared experts for those of its experts."""
    config = DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=16, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=0,
    )  # fmt: skip
    torch.manual_seed(5)
    plain = DeepseekV3ForCausalLM(config)
    plain.save_pretrained(tmp_path / "base")
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ["output", "gate_up", "down"]}
    wanted = profile(theirs, model=from_config_json(config.to_dict()), lora=lora)
    weights = plain.state_dict()
    with Trainer(wanted) as trainer:
        model = trainer.stages[0]
        initialize(model.named_parameters(), trainer.mesh.tensor, 0)
        names = [box.name for _, box in boxes(model) if ".lora." not in box.name]
        weights = to_our_names(wanted.model, names, weights)
        with torch.no_grad():
            for parameter, box in boxes(model):
                if ".lora.b." in box.name:
                    box.view(parameter).normal_(std=0.1)
                elif box.name in weights:
                    box.view(parameter).copy_(weights[box.name])
            tokens = torch.arange(20)[None]
            logits = full_logits(**model.logits_arguments(model(tokens, torch.arange(20))))
        about = {"profile": wanted.model_dump(mode="json")}
        checkpoint.save(tmp_path / "saved", make_optimizer(trainer), about)
    convert(tmp_path / "base", tmp_path / "merged", Options("hf", adapters=tmp_path / "saved"))
    with torch.no_grad():
        merged = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "merged").eval()(tokens).logits
        assert (plain.eval()(tokens).logits - merged).abs().max() > 1e-2
    torch.testing.assert_close(merged[0], logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="PEFT treats every gate_proj"):
        peft.write(TrainedAdapters(tmp_path / "saved"), tmp_path / "adapter")
