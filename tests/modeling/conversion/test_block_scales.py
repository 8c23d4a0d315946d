"""Float8 weights with a scale for each block of 128 × 128, of complete tensors and of parts of one."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM

from modeling.conversion import formats
from modeling.conversion.convert import Options, convert
from tests.modeling.conversion.test_convert import DEEPSEEK
from tests.modeling.models.families.test_families import MIXED, SIZES


def quantized_to_float8(
    stored: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors with projections in float8 and scales of this dtype, and the same tensors in bfloat16."""
    expected, quantized = {}, {}
    for name, tensor in stored.items():
        expected[name] = quantized[name] = tensor
        if "proj" in name and name.endswith(".weight"):
            scales = (torch.rand([-(-size // 128) for size in tensor.shape]) + 0.5).to(dtype)
            quantized[name] = (tensor.float() * 100).to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scales
            factors = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = tensor.shape
            expected[name] = (quantized[name].float() * factors[:rows, :columns]).to(torch.bfloat16)
    return quantized, expected


def test_float8_parts_of_a_tensor_are_read_with_the_scales_of_their_rows(tmp_path):
    """As published for Qwen3-Next: scales in bfloat16, and projections with the rows of several of ours."""
    config = AutoConfig.for_model("qwen3_next", **{**SIZES, **MIXED["qwen3_next"][-1], "hidden_size": 136})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16/model.safetensors")
    quantized, expected = quantized_to_float8(stored, torch.bfloat16)
    assert quantized["model.layers.0.linear_attn.in_proj_qkvz.weight_scale_inv"].shape == (1, 2)
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8/config.json").write_text((tmp_path / "bf16/config.json").read_text())
    save_file(quantized, tmp_path / "fp8/model.safetensors")
    convert(tmp_path / "fp8", tmp_path / "back", Options("hf"))
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected)


def test_float8_weights_with_block_scales_are_read_as_bf16(tmp_path):
    """As published for DeepSeek-V3: blocks of 128, some smaller, multi-token prediction as an extra layer."""
    config = copy.deepcopy(DEEPSEEK)
    config.update({"hidden_size": 136, "q_lora_rank": 130, "num_nextn_predict_layers": 0})
    torch.manual_seed(0)
    source = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16/model.safetensors")
    quantized, expected = quantized_to_float8(stored, torch.float32)
    quantized["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8/config.json").write_text((tmp_path / "bf16/config.json").read_text())
    path = tmp_path / "fp8/model.safetensors"
    save_file(quantized, path)
    convert(tmp_path / "fp8", tmp_path / "back", Options("hf"))
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected)
    assert {name for name in found if found[name].dtype == torch.float32} == {
        name for name in found if name.endswith("e_score_correction_bias")
    }
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file({**quantized, f"{name}_scale_inv": torch.ones(1, 1)}, path)
    with pytest.raises(
        ValueError, match=r"o_proj\.weight: scales of shape \(1, 1\); blocks of 128 × 128 have \(2, 1\)"
    ):
        formats.read(tmp_path / "fp8", None, None)
    del quantized[f"{name}_scale_inv"]
    save_file(quantized, path)
    with pytest.raises(ValueError, match=r"o_proj\.weight: is in float8_e4m3fn, but the files have no"):
        formats.read(tmp_path / "fp8", None, None)
