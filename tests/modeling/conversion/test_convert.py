"""Conversion of checkpoints: Hugging Face forms, round trips, interruption, corrupted files, memory."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from modeling.conversion import convert as convert_module
from modeling.conversion import formats, huggingface, journal, native
from modeling.conversion.compare import differences
from modeling.conversion.convert import Options, convert
from parallel.checkpoint.reader import Reader
from profiles.errors import ProfileError
from profiles.huggingface.config import GENERATION_CONFIG, TOKEN_IDS
from profiles.sections import families
from tests.modeling.conversion.nxd import nxd_shards
from tests.modeling.conversion.trained import save_trained
from tests.modeling.models.families.test_families import CONFIGS, MIXED, SIZES
from tests.parity.harness import Case

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 101}
DEEPSEEK = DeepseekV3Config(
    **{**LLAMA, "num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=8, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
    first_k_dense_replace=1,
)  # fmt: skip
GLM = Glm4MoeConfig(
    **LLAMA, head_dim=16, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
    use_qk_norm=True, num_nextn_predict_layers=0,
)  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
    **{
        name: lambda name=name, fields=configs[-1]: AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                families.OWN[name].model_type or name,
                **{
                    **SIZES,
                    "intermediate_size": 56,
                    **fields,
                    **({"linear_num_key_heads": 4, "linear_num_value_heads": 8} if name in MIXED else {}),
                },
            )
        )
        for name, configs in {**CONFIGS, **MIXED}.items()
        if name != "llama"
    },
    "dbrx": lambda: DbrxForCausalLM(
        DbrxConfig(
            d_model=32,
            n_heads=4,
            n_layers=2,
            vocab_size=101,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        )
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**LLAMA, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gpt_oss, full": lambda: GptOssForCausalLM(
        GptOssConfig(
            **LLAMA,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["full_attention"] * 3,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**LLAMA, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DEEPSEEK),
    "glm4_moe": lambda: Glm4MoeForCausalLM(GLM),
    "gpt": lambda: GPT2LMHeadModel(GPT2Config(**GPT)),
    "gpt, untied": lambda: GPT2LMHeadModel(GPT2Config(**GPT, tie_word_embeddings=False)),
}


def save(model, folder: Path, **options) -> Path:
    """Save a Hugging Face model with random weights and biases."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture
def llama(tmp_path) -> Path:
    return save(MODELS["llama"](), tmp_path / "hf")


def equal(one: Path, other: Path) -> bool:
    return not differences(formats.read(one, None, None), formats.read(other, None, None), 1 << 20)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_hugging_face_round_trips_through_a_topology(make, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)  # several files with an index
    monkeypatch.setattr(native, "FILE_BYTES", 20_000)
    source = save(make(), tmp_path / "hf", max_shard_size="20KB")
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    for name, degrees in {"one": {}, "split": {"tensor": 4, "pipeline": 2}}.items():
        convert(source, tmp_path / name, Options("trainshed", **degrees))
        convert(tmp_path / name, tmp_path / f"back-{name}", Options("hf"))
        assert (tmp_path / f"back-{name}" / "model.safetensors.index.json").exists()
        found = AutoModelForCausalLM.from_pretrained(tmp_path / f"back-{name}").state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_fsdp_checkpoint_converts_like_a_zero1_checkpoint(pool, tmp_path):
    """On four ranks, of which two shard the parameters of a tensor rank."""
    for sharding in ("fsdp", "zero1"):
        case = Case(tensor=2, data=2, sharding=sharding)
        pool.run(save_trained, case.world, folder=tmp_path / sharding, case=case)
        convert(tmp_path / sharding, tmp_path / f"hf-{sharding}", Options("hf"))
    fsdp, zero1 = (load_file(tmp_path / f"hf-{name}" / "model.safetensors") for name in ("fsdp", "zero1"))
    torch.testing.assert_close(fsdp, zero1, rtol=1e-4, atol=1e-6)
    stored = Reader(tmp_path / "fsdp").tensors
    box = next(tensor.boxes[-1] for name, tensor in stored.items() if name.startswith(native.PREFIX))
    with (tmp_path / "fsdp" / box.file).open("r+b") as file:
        file.seek(box.start + box.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match=rf"{box.file}: corrupted: the 16 KiB from byte .* differ"):
        convert(tmp_path / "fsdp", tmp_path / "hf-corrupted", Options("hf"))


def test_checkpoint_is_as_large_as_its_weights(llama, tmp_path):
    convert(llama, tmp_path / "trainshed", Options("trainshed", tensor=2))
    stored = sum(path.stat().st_size for path in (tmp_path / "trainshed").glob("*.distcp"))
    weights = formats.read(llama, None, None)
    assert stored < weights.nbytes() + 2000 * 2 * len(weights.shapes)  # a header per box


def test_split_checkpoint_has_one_file_per_rank(llama, tmp_path):
    convert(llama, tmp_path / "split", Options("trainshed", tensor=4, cuts=(2,)))
    for name, stored in Reader(tmp_path / "split").tensors.items():
        files = {box.file for box in stored.boxes}
        if "layers.0" in name and name.endswith("gate.weight"):
            assert len(stored.boxes) == len(files) == 4
            assert {box.sizes for box in stored.boxes} == {(stored.shape[0] // 4, stored.shape[1])}
            assert files == {f"__{rank}_0.distcp" for rank in range(4)}
        # two KV heads on four ranks: written by the first rank of each pair
        if "layers.2" in name and ".qkv.k." in name:
            assert files == {"__4_0.distcp", "__6_0.distcp"}


BIN_FORMS = {
    "one bin file": lambda state, folder: torch.save(state, folder / "pytorch_model.bin"),
    "format before torch 1.6": lambda state, folder: torch.save(
        state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
    "base model without its head": lambda state, folder: torch.save(
        {
            name.removeprefix("transformer."): tensor
            for name, tensor in state.items()
            if "lm_head" not in name
        },
        folder / "pytorch_model.bin",
    ),
    "with attention masks": lambda state, folder: torch.save(
        state | {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}, folder / "pytorch_model.bin"
    ),
    "one safetensors file": lambda state, folder: save_file(
        {name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors"
    ),
}


@pytest.mark.parametrize("write", BIN_FORMS.values(), ids=BIN_FORMS.keys())
def test_reads_other_hugging_face_forms(write, tmp_path):
    source = save(MODELS["gpt"](), tmp_path / "hf")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((source / "config.json").read_text())
    write(AutoModelForCausalLM.from_pretrained(source).state_dict(), other)
    assert equal(source, other)


def test_reads_bin_with_an_index(llama, tmp_path):
    state = load_file(llama / "model.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((llama / "config.json").read_text())
    index = {}
    for number, names in enumerate((list(state)[:9], list(state)[9:])):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({name: state[name] for name in names}, other / file)
        index |= dict.fromkeys(names, file)
    (other / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert equal(llama, other)
    (other / file).unlink()
    with pytest.raises(ValueError, match=f"{file}: missing"):
        formats.read(other, None, None)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (
            lambda s: s.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing: model\.layers\.1\.mlp\.up_proj\.weight; check that",
        ),
        (lambda s: s.pop("lm_head.weight"), r"missing: lm_head\.weight; set tie_word_embeddings to true"),
        (lambda s: s.update(extra=torch.ones(2)), "does not have: extra"),
        (
            lambda s: s.update({"lm_head.weight": torch.ones(101, 31)}),
            r"lm_head\.weight: shape \(101, 31\)",
        ),
        (lambda s: s.update({"model.norm.weight": torch.ones(32).int()}), r"norm\.weight: dtype int32"),
    ],
)
def test_incomplete_model_is_rejected_by_tensor_name(corrupt, message, llama):
    state = load_file(llama / "model.safetensors")
    corrupt(state)
    save_file(state, llama / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        formats.read(llama, None, None)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_corrupted_file_is_named(name, llama):
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(b"\x80\x02}q\x00")
    with pytest.raises(ValueError, match=rf"{name}: corrupted|{name}: rejected"):
        formats.read(llama, None, None)


def test_invalid_config_beside_the_weights_is_reported_for_the_source(llama):
    (llama / "config.json").write_text("{")
    with pytest.raises(ProfileError, match=r"SOURCE = .*config\.json: cannot be read"):
        formats.read(llama, None, None)


def test_checkpoint_of_an_unknown_model_is_rejected_by_key(tmp_path):
    marker = {"step": 0, "profile": {"model": {"hiden_size": 8}}}
    (tmp_path / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(
        ValueError, match=r"a model: model\.hiden_size = 8: there is no such key in model; nearest"
    ):
        native.describe(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_file_that_cannot_be_read_is_not_called_corrupted(form, llama, monkeypatch):
    path = llama / "model.safetensors"
    if form == "bin":
        torch.save(
            {name: tensor.clone() for name, tensor in load_file(path).items()}, llama / "pytorch_model.bin"
        )
        path.unlink()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr("safetensors.safe_open", fail)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(OSError, match=r"model.\w+: cannot be read: .*stale file handle"):
        formats.read(llama, None, None)


def test_malicious_bin_and_metadata_are_rejected(llama, tmp_path):
    convert(llama, tmp_path / "trainshed", Options("trainshed"))
    import pickle

    (tmp_path / "trainshed" / ".metadata").write_bytes(pickle.dumps(nxd_shards.Hostile(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"\.metadata: rejected: .* is not allowed"):
        formats.read(tmp_path / "trainshed", None, None)
    (llama / "model.safetensors").unlink()
    torch.save({"lm_head.weight": nxd_shards.Hostile(tmp_path / "ran")}, llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: rejected: it would run"):
        formats.read(llama, None, None)
    assert not (tmp_path / "ran").exists()


class Interrupted(Exception):
    pass


def test_interrupted_conversion_resumes_with_the_missing_files(llama, tmp_path, monkeypatch):
    options = Options("nxd", tensor=4, pipeline=2)
    convert(llama, tmp_path / "undisturbed", options)
    target = tmp_path / "nxd"
    monkeypatch.setattr(convert_module, "WORKERS", 1)
    add = journal.Journal.add

    def add_three(self, name, path, note, sha256):
        if len(self.files) == 3:
            raise Interrupted
        add(self, name, path, note, sha256)

    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "add", add_three)
        with pytest.raises(Interrupted):
            convert(llama, target, options)
    done = {path: path.stat().st_mtime_ns for path in sorted((target / "model").glob("*.pt"))}
    assert len(done) == 3
    corrupted = min(done)
    content = bytearray(corrupted.read_bytes())
    content[-400] ^= 1
    corrupted.write_bytes(content)
    assert not (target / "conversion.json").exists()

    record = convert(llama, target, options)
    intact = [path for path in done if path != corrupted]
    assert [path.stat().st_mtime_ns for path in intact] == [done[path] for path in intact]
    for name, entry in record["files"].items():
        assert (target / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
        assert journal.file_sha256(target / name) == entry["sha256"]
    assert not list(target.rglob("*.partial"))
    assert convert(llama, target, options) == record  # already converted


@pytest.fixture
def run(llama, tmp_path) -> Path:
    """A run's folder with checkpoints of steps 1 to 3, whose weights all equal the step."""
    state = load_file(llama / "model.safetensors")
    for step in (1, 2, 3):
        save_file(
            {name: torch.full_like(tensor, step) for name, tensor in state.items()},
            llama / "model.safetensors",
        )
        convert(llama, tmp_path / f"run/checkpoints/step_{step}", Options("trainshed"))
    return tmp_path / "run"


def test_average_ends_at_the_named_checkpoint(run, tmp_path):
    for source, mean in ((run, 2.5), (run / "checkpoints/step_2", 1.5)):
        convert(source, tmp_path / str(mean), Options("hf", last=2))
        found = load_file(tmp_path / str(mean) / "model.safetensors")
        assert all(tensor.eq(mean).all() for tensor in found.values())
    with pytest.raises(ProfileError, match=r"--average = 2: .* has 1 complete checkpoint up to step_1"):
        convert(run / "checkpoints/step_1", tmp_path / "one", Options("hf", last=2))


def test_average_of_models_that_only_their_configs_distinguish_is_rejected(llama, tmp_path, caplog):
    """Of twice as many heads of half the size, and of another RoPE."""
    other = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((llama / "config.json").read_text())
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    (other / "config.json").write_text(json.dumps({**config, **heads}))
    found = "model.num_attention_heads is 4 in the first, 2 in checkpoint 2; model.num_key_value_heads is 2"
    with pytest.raises(ValueError, match=f"belong to different models: {found}"):
        convert(llama, tmp_path / "mean", Options("hf", average=(other,)))
    (other / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 5e5}}))
    convert(llama, tmp_path / "mean", Options("hf", average=(other,)))
    assert "model.rope_theta is 10000.0 in the first, 500000.0 in checkpoint 2" in caplog.text


def test_average_of_other_checkpoints_is_another_conversion(run, tmp_path):
    convert(run, tmp_path / "mean", Options("hf", last=2))
    shutil.rmtree(run / "checkpoints/step_2")
    with pytest.raises(ProfileError, match=r"DESTINATION = .*holds something else"):
        convert(run, tmp_path / "mean", Options("hf", last=2))


def test_average_with_a_run_is_the_same_conversion_while_the_run_continues(llama, run, tmp_path):
    record = convert(llama, tmp_path / "mean", Options("hf", average=(run,)))
    (run / "metrics.jsonl").write_text("{}")
    assert convert(llama, tmp_path / "mean", Options("hf", average=(run,))) == record


def test_special_tokens_of_a_hugging_face_source_are_kept(llama, tmp_path):
    """Read by transformers: the source's ids and generation_config.json; none if the source has neither."""
    (llama / GENERATION_CONFIG).write_text('{"eos_token_id": [7, 8], "temperature": 0.5}')
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": 7, "pad_token_id": 9}))
    sources = {"folder": llama, "file": llama / "model.safetensors"}
    for name, source in sources.items():
        convert(source, tmp_path / name, Options("hf"))
    convert(llama, tmp_path / "trainshed", Options("trainshed"))
    convert(tmp_path / "trainshed", tmp_path / "named", Options("hf", config=llama))
    for name in (*sources, "named"):
        found = AutoConfig.from_pretrained(tmp_path / name)
        assert [getattr(found, key) for key in TOKEN_IDS] == [1, 7, 9]
        copied = (tmp_path / name / GENERATION_CONFIG).read_bytes()
        assert copied == (llama / GENERATION_CONFIG).read_bytes()
    (llama / GENERATION_CONFIG).write_text('{"eos_token_id": [7, 8]}')
    for name, source, config in (("file", sources["file"], None), ("named", tmp_path / "trainshed", llama)):
        with pytest.raises(ProfileError, match="holds something else"):  # rather than "already converted"
            convert(source, tmp_path / name, Options("hf", config=config))
    convert(tmp_path / "trainshed", tmp_path / "unknown", Options("hf"))
    found = AutoConfig.from_pretrained(tmp_path / "unknown")
    assert [getattr(found, key) for key in TOKEN_IDS] == [None, None, None]
    assert not (tmp_path / "unknown" / GENERATION_CONFIG).exists()


def test_destination_with_other_files_is_rejected_unchanged(llama, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ProfileError, match=r"DESTINATION = .*holds something else"):
        convert(llama, tmp_path / "mine", Options("trainshed"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options("nxd", tensor=3), "--tensor = 3: does not split 4 query heads.*: 2, 4"),
        (Options("nxd", pipeline=4), "--pipeline = 4: the model has 3 layers; nearest valid: 3"),
        (Options("nxd", nxd_qkv="coalesced"), "--nxd-qkv = coalesced.*: separate, fused"),
        (
            Options("hf", average=(Path("other"),), adapters=Path("lora")),
            "--average = other: cannot be combined with --adapters",
        ),
    ],
)
def test_invalid_options_are_rejected(options, message, llama, tmp_path):
    with pytest.raises(ProfileError, match=message):
        convert(llama, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
