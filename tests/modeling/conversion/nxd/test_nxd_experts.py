"""NxD shards of Mixtral and DBRX: read in every form NxD writes, written in the form of its layers."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modeling.conversion import formats
from modeling.conversion.compare import differences
from modeling.conversion.convert import Options, convert
from modeling.conversion.nxd import experts as nxd_experts
from tests.modeling.conversion.nxd import nxd_shards
from tests.modeling.conversion.nxd.nxd_shards import FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
from tests.modeling.conversion.nxd.test_nxd import ONE_STAGE, TWO_STAGES, assert_equal

EXPERTS = 4
MIXTRAL = {
    **nxd_shards.CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "model_type": "dbrx",
    "d_model": HIDDEN,
    "n_heads": HEADS,
    "n_layers": LAYERS,
    "max_seq_len": 64,
    "vocab_size": VOCABULARY,
    "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": FFN, "moe_num_experts": EXPERTS, "moe_top_k": 2},
}
DBRX_NAMES = {
    "model.layers": "transformer.blocks",
    "self_attn": "norm_attn_norm.attn",
    "input_layernorm": "norm_attn_norm.norm_1",
    "post_attention_layernorm": "norm_attn_norm.norm_2",
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.norm_f",
    ".mlp.": ".ffn.",
}
Files = dict[str, dict[str, Tensor]]


def dbrx_name(name: str) -> str:
    for part, other in DBRX_NAMES.items():
        name = name.replace(part, other)
    return name


def experts() -> list[dict[str, Tensor]]:
    """Weights of each layer: router (E, h), w1 and w3 (E, f, h), w2 (E, h, f)."""
    torch.manual_seed(1)
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "w1": (EXPERTS, FFN, HIDDEN),
        "w3": (EXPERTS, FFN, HIDDEN),
        "w2": (EXPERTS, HIDDEN, FFN),
    }
    return [{name: torch.randn(shape).bfloat16() for name, shape in shapes.items()} for _ in range(LAYERS)]


def model(family: str) -> dict[str, Tensor]:
    """The weights by their names in Hugging Face's files."""
    weights = {name: tensor for name, tensor in nxd_shards.model().items() if ".mlp." not in name}
    for layer, own in enumerate(experts()):
        if family == "mixtral":
            prefix = f"model.layers.{layer}.block_sparse_moe"
            weights[f"{prefix}.gate.weight"] = own["router"]
            for name in ("w1", "w2", "w3"):
                for expert, tensor in enumerate(own[name]):
                    weights[f"{prefix}.experts.{expert}.{name}.weight"] = tensor
            continue
        prefix = f"transformer.blocks.{layer}.ffn"
        weights[f"{prefix}.router.layer.weight"] = own["router"]
        weights[f"{prefix}.experts.mlp.w1"] = own["w1"].reshape(-1, HIDDEN)
        weights[f"{prefix}.experts.mlp.v1"] = own["w3"].reshape(-1, HIDDEN)
        weights[f"{prefix}.experts.mlp.w2"] = own["w2"].transpose(1, 2).reshape(-1, HIDDEN)
        take = f"model.layers.{layer}.self_attn"
        qkv = [weights.pop(f"{take}.{letter}_proj.weight") for letter in "qkv"]
        weights[f"{take}.Wqkv.weight"] = torch.cat(qkv)
        weights[f"{take}.out_proj.weight"] = weights.pop(f"{take}.o_proj.weight")
    if family == "mixtral":
        return weights
    return {name if ".ffn." in name else dbrx_name(name): tensor for name, tensor in weights.items()}


def shards(
    family: str, tensor: int, stages: list[range], expert_ranks: int = 1, converter: bool = False
) -> Files:
    """Every rank's tensors by file name, in the form of NxD's layers, or of its converter for Mixtral."""
    files: Files = {}
    for (t, p), dense in nxd_shards.shards(nxd_shards.model(), tensor, stages).items():
        others = {name: value for name, value in dense.items() if ".mlp." not in name}
        for layer in stages[p]:
            others[f"model.layers.{layer}.mlp.router.linear_router.weight"] = experts()[layer]["router"]
        for e in range(expert_ranks):
            state = dict(others) if e == 0 else {}
            for layer in stages[p]:
                w1, w3, w2 = (experts()[layer][name].chunk(expert_ranks)[e] for name in ("w1", "w3", "w2"))
                if not converter:
                    w1, w3, w2 = (weight.transpose(1, 2) for weight in (w1, w3, w2))
                halves = [weight.chunk(tensor, 2)[t] for weight in (w1, w3)]
                prefix = f"model.layers.{layer}.mlp.expert_mlps.mlp_op"
                state[f"{prefix}.gate_up_proj.weight"] = torch.cat(halves, 2)
                state[f"{prefix}.down_proj.weight"] = w2.chunk(tensor, 1)[t].contiguous()
            if family == "dbrx":
                state = {dbrx_name(name): value for name, value in state.items()}
            rank = f"ep_rank_{e:02}_" if expert_ranks > 1 else ""
            files[f"model/dp_rank_00_{rank}tp_rank_{t:02}_pp_rank_{p:02}.pt"] = state
    return files


def save(files: Files, folder: Path) -> Path:
    for name, state in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / name)
    return folder


@pytest.fixture(params=["mixtral", "dbrx"])
def family(request) -> str:
    return request.param


def config_of(family: str, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(MIXTRAL if family == "mixtral" else DBRX))
    return path


@pytest.mark.parametrize(("tensor", "stages", "expert_ranks"), [(1, ONE_STAGE, 1), (4, TWO_STAGES, 2)])
def test_shards_of_experts_are_read(family, tensor, stages, expert_ranks, tmp_path):
    folder = save(shards(family, tensor, stages, expert_ranks), tmp_path / "nxd")
    assert_equal(formats.read(folder, config_of(family, tmp_path), "trn1"), model(family))


def test_untransposed_shards_of_nxds_mixtral_converter_are_read(tmp_path):
    folder = save(shards("mixtral", 2, ONE_STAGE, 2, converter=True), tmp_path / "nxd")
    assert_equal(formats.read(folder, config_of("mixtral", tmp_path), None), model("mixtral"))


def test_shards_with_megatron_names_are_read(tmp_path):
    files = {
        name: {
            key.replace(".mlp.", ".mlp.moe."): value
            for key, value in nxd_shards.with_megatron_names(state).items()
        }
        for name, state in shards("mixtral", 2, ONE_STAGE).items()
    }
    keys = next(iter(files.values()))
    assert "language_model.encoder.layers.0.mlp.moe.expert_mlps.mlp_op.down_proj.weight" in keys
    folder = save(files, tmp_path / "nxd")
    assert_equal(formats.read(folder, config_of("mixtral", tmp_path), None), model("mixtral"))


@pytest.mark.parametrize("tensor", [2, 4])
def test_written_shards_have_the_form_of_nxds_layers(family, tensor, tmp_path, monkeypatch):
    """In slices with fewer rows than an expert, through a checkpoint for other ranks, and back."""
    monkeypatch.setattr(Options, "slice_bytes", 1500)
    source, config = save(shards(family, 1, ONE_STAGE), tmp_path / "one"), config_of(family, tmp_path)
    convert(source, tmp_path / "split", Options("trainshed", config, tensor=2, pipeline=2))
    convert(tmp_path / "split", tmp_path / "nxd", Options("nxd", tensor=tensor, pipeline=2))
    for name, expected in shards(family, tensor, TWO_STAGES).items():
        written = torch.load(tmp_path / "nxd" / name, weights_only=True)
        assert written.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(written[key], value), key
    again = formats.read(tmp_path / "nxd", config, "trn1")
    assert not differences(again, formats.read(source, config, None), 1 << 20)


class TensorReference:
    def __init__(self, tid: int) -> None:
        self.tid = tid


def test_other_expert_ranks_files_need_no_shared_tensors(tmp_path, monkeypatch):
    """In the xser form they refer to tensors that only the first rank's folder contains."""
    for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torch_xla.utils.serialization"].TensorReference = TensorReference
    monkeypatch.setattr(TensorReference, "__module__", "torch_xla.utils.serialization")
    files = shards("mixtral", 1, ONE_STAGE, 2)
    for name, state in files.items():
        references = {}
        for number, (key, value) in enumerate(state.items()):
            references[key] = TensorReference(number)
            path = tmp_path / "nxd" / f"{name}.tensors" / f"tensor_{number}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, path)
        if "ep_rank_01" in name:
            references["model.norm.weight"] = TensorReference(99)
        torch.save(references, tmp_path / "nxd" / name)
    assert_equal(formats.read(tmp_path / "nxd", config_of("mixtral", tmp_path), None), model("mixtral"))


LAST = "model/dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt"
GATE_UP = "model.layers.2.mlp.expert_mlps.mlp_op.gate_up_proj.weight"


def without_last_rank(files: Files) -> None:
    del files[LAST]


def without_a_layer(files: Files) -> None:
    del files[LAST][GATE_UP]


def of_another_width(files: Files) -> None:
    files[LAST][GATE_UP] = files[LAST][GATE_UP][..., :-2].contiguous()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (
            without_last_rank,
            r"gate_up_proj\.weight has shape \(2, 32, 96\); this model over 1 tensor and 1 expert ranks has",
        ),
        (without_a_layer, r"missing: model\.layers\.2\.mlp\.expert_mlps\.mlp_op\.gate_up_proj\.weight"),
        (of_another_width, r"gate_up_proj\.weight has shape \(2, 32, 94\)"),
    ],
)
def test_incomplete_experts_are_rejected_by_name(corrupt, message, tmp_path):
    files = shards("mixtral", 1, ONE_STAGE, 2)
    corrupt(files)
    with pytest.raises(ValueError, match=message):
        formats.read(save(files, tmp_path / "nxd"), config_of("mixtral", tmp_path), None)


def test_square_experts_are_rejected_because_their_shape_is_ambiguous(tmp_path):
    stored = nxd_experts.LazyTensor((EXPERTS, HIDDEN, 2 * HIDDEN), torch.bfloat16, lambda: torch.empty(0))
    config = config_of("mixtral", tmp_path)
    config.write_text(json.dumps({**MIXTRAL, "intermediate_size": HIDDEN}))
    with pytest.raises(ValueError, match=r"both 32, so its shape does not show whether"):
        [*nxd_experts.parts(GATE_UP, stored, formats.read_config(config), 0, 1, 0, 1)]
