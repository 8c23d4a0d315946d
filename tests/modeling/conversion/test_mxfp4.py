"""Published GPT-OSS in MXFP4: dequantized like transformers, any topology, corrupted files rejected."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from modeling.conversion import formats, mxfp4
from modeling.conversion.convert import Options, convert
from modeling.models.families import model_class
from parallel import Mesh
from tests.modeling.models.families.huggingface import boxes

HIDDEN, WIDTH, EXPERTS, LAYERS = 64, 96, 4, 2
CONFIG = GptOssConfig(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=101,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    sliding_window=8,
)
NAME = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder as on the hub: experts as blocks and scales in two files, everything else in bf16."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(CONFIG).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_proj")}
    for layer in range(LAYERS):
        for name, rows, columns in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            shape = (EXPERTS, rows, columns // 32)
            state[f"{key}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            state[f"{key}_scales"] = torch.randint(118, 126, shape, dtype=torch.uint8)
    folder = tmp_path_factory.mktemp("published")
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    config = {**CONFIG.to_dict(), "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GptOssForCausalLM"]}))
    files = {name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in state}
    for file in set(files.values()):
        save_file({name: state[name].contiguous() for name in state if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def assert_equals_transformers(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Bit for bit, except that any NaN equals another."""
    found = mxfp4.dequantize(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).contiguous()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    same = found.view(torch.int16) == expected.view(torch.int16)
    assert (same | (found.isnan() & expected.isnan())).all()


def test_every_byte_with_every_scale_equals_transformers_dequantization():
    """Including subnormal numbers, negative zeros and infinities."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(256, 16, 16)
    assert_equals_transformers(
        blocks[:, None], torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 1, 16)
    )


@settings(max_examples=20, deadline=None)
@given(
    st.tuples(*[st.integers(1, size) for size in (3, 5, 4)]),
    st.sampled_from([(0, 4), (120, 135), (250, 256), (0, 256)]),
    st.integers(0, 2**31),
)
def test_any_shape_equals_transformers_dequantization(shape, scales, seed):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    assert_equals_transformers(blocks, torch.randint(*scales, shape, dtype=torch.uint8, generator=generator))


def test_published_checkpoint_converts_to_transformers_weights_and_logits(published, tmp_path, caplog):
    """With tensor ranks whose columns end within a block of 32."""
    caplog.set_level("INFO", "modeling")
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.bfloat16).eval()
    expected = theirs.state_dict()
    convert(published, tmp_path / "split", Options("trainshed", tensor=2, pipeline=2))
    assert "4 weights in MXFP4 are read as bfloat16, and written as such" in caplog.text
    convert(tmp_path / "split", tmp_path / "hf", Options("hf"))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], tensor), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config

    weights = formats.read(published, None, None)
    ours = model_class("gpt_oss")(weights.model, Mesh())
    with torch.no_grad():
        for parameter, box in boxes(ours):
            box.view(parameter).copy_(weights.read(box.name, box.offsets, box.sizes))
        tokens = torch.randint(0, CONFIG.vocab_size, (2, 24))
        logits = theirs.float()(tokens).logits
        found = (ours(tokens, torch.arange(24)) @ ours.head.weight.t()).view_as(logits)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5 * float(logits.abs().max()))


def test_only_the_slices_that_are_read_are_dequantized(published, tmp_path, monkeypatch):
    """A conversion's memory does not depend on the size of the experts."""
    counts = []

    def counted(blocks, scales):
        counts.append(2 * blocks.numel())
        return dequantize(blocks, scales)

    dequantize = mxfp4.dequantize
    monkeypatch.setattr(mxfp4, "dequantize", counted)
    monkeypatch.setattr(Options, "slice_bytes", 1024)  # 5 rows of 96 columns, of which a slice has 48
    convert(published, tmp_path / "split", Options("trainshed", tensor=2))
    assert max(counts) * 2 <= 1024 * 4 / 3  # the slice's blocks of 32 columns extend beyond it
    assert sum(counts) > EXPERTS * LAYERS * 3 * HIDDEN * WIDTH


def test_slice_of_any_columns_equals_that_of_the_complete_weight(published):
    weights = formats.read(published, None, None)
    for name in ("layers.0.mlp.down.3.weight", "layers.1.mlp.gate_up.2.up.weight"):
        rows, columns = weights.shapes[name]
        whole = weights.read(name, (0, 0), (rows, columns))
        for low, high in ((0, 1), (31, 33), (5, 64), (33, columns), (32, 64)):
            assert torch.equal(weights.read(name, (7, low), (2, high - low)), whole[7:9, low:high])


def _edit(folder: Path, change) -> None:
    for path in folder.glob("*.safetensors"):
        state = load_file(path)
        change(state)
        save_file(state, path)


def _replace(name: str, change):
    return lambda state: state.update({name: change(state[name])}) if name in state else None


CORRUPTED = {
    "scales missing": (
        lambda s: s.pop(f"{NAME}_scales", None),
        f"{NAME}_scales: missing, but .*{NAME}_blocks",
    ),
    "blocks missing": (
        lambda s: s.pop(f"{NAME}_blocks", None),
        f"{NAME}_blocks: missing, but .*{NAME}_scales",
    ),
    "both missing": (
        lambda s: [s.pop(NAME + end, None) for end in ("_blocks", "_scales")],
        r"missing: model\.layers\.1\.mlp\.experts\.gate_up_proj",
    ),
    "scales of other experts": (
        _replace(f"{NAME}_scales", lambda tensor: tensor[:3].clone()),
        rf"{NAME}_scales: shape \(3, 192, 2\); the model has \(4, 192, 2\)",
    ),
    "flat blocks": (
        _replace(f"{NAME}_blocks", lambda tensor: tensor.flatten(-2)),
        rf"{NAME}_blocks: shape \(4, 192, 32\); the model has \(4, 192, 2, 16\)",
    ),
    "scales as numbers": (
        _replace(f"{NAME}_scales", torch.Tensor.bfloat16),
        f"{NAME}_scales: dtype bfloat16",
    ),
    "dequantized too": (
        lambda s: (
            s.update({NAME: torch.zeros(EXPERTS, HIDDEN, 2 * WIDTH)}) if f"{NAME}_scales" in s else None
        ),
        f"{NAME}: stored twice",
    ),
}


@pytest.mark.parametrize(("change", "message"), CORRUPTED.values(), ids=CORRUPTED.keys())
def test_blocks_and_scales_that_do_not_fit_are_rejected_by_name(change, message, published, tmp_path):
    folder = Path(shutil.copytree(published, tmp_path / "corrupted"))
    _edit(folder, change)
    with pytest.raises(ValueError, match=message):
        formats.read(folder, None, None)


@pytest.mark.parametrize("scale", [254, 255])
def test_weights_that_are_not_finite_are_rejected(scale, published, tmp_path):
    folder = Path(shutil.copytree(published, tmp_path / "corrupted"))
    _edit(
        folder,
        _replace(
            f"{NAME}_scales",
            lambda t: t.index_put(
                (torch.tensor(2), torch.tensor(2), torch.tensor(1)), torch.tensor(scale, dtype=torch.uint8)
            ),
        ),
    )
    with pytest.raises(ValueError, match=rf"{NAME}_scales: weights of expert 2 are not finite"):
        convert(folder, tmp_path / "hf", Options("hf"))
    assert not (tmp_path / "hf" / "conversion.json").exists()
