"""LoRA adapters in NxD shards: assembled, merged, written for PEFT, and rejected if ranks disagree."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from flows.cli.main import main
from modeling.conversion import formats, native
from modeling.conversion.adapters.adapters import Adapters, Factors
from modeling.conversion.adapters.peft import PeftAdapters
from modeling.conversion.adapters.peft import write as write_peft
from modeling.conversion.convert import Options, convert
from modeling.conversion.formats import read_adapters
from modeling.conversion.weights import Weights
from modeling.models.families import huggingface_tensor
from parallel.checkpoint import locations
from parallel.checkpoint.reader import Reader
from profiles.errors import ProfileError
from profiles.huggingface.config import from_config_json
from profiles.sections.model import Model
from tests.modeling.conversion.nxd import nxd_shards
from tests.modeling.conversion.nxd.nxd_shards import LAYERS
from tests.modeling.conversion.trained import save_trained
from tests.modeling.models.families.test_families import CONFIGS, SIZES
from tests.parallel.checkpoint.test_integrity import flip
from tests.parity.harness import Case

RANK, ALPHA = 3, 6
FILE = "step_9/model/dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt"
CONFIGURATION = {
    "lora_rank": RANK,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.1,
    "target_modules": {"qkv_proj"},
    "bias": "none",
}
STAGES = [range(2), range(2, 4)]


def adapters() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A and B of each projection by Hugging Face names; those of one NxD layer share A."""
    torch.manual_seed(1)
    layers = {
        "self_attn": [("q_proj", "k_proj", "v_proj"), ("o_proj",)],
        "mlp": [("gate_proj", "up_proj"), ("down_proj",)],
    }
    a, b = {}, {}
    for name, weight in nxd_shards.model().items():
        block, _, projection = name.removesuffix(".weight").rpartition(".")
        for group in layers.get(block.rpartition(".")[2], ()):
            if projection in group:
                shared = a.get(f"{block}.{group[0]}.weight")
                a[name] = torch.randn(RANK, weight.shape[1]) if shared is None else shared
                b[name] = torch.randn(weight.shape[0], RANK)
    return a, b


def shards(tensor: int, *, base: bool) -> dict[tuple[int, int], dict[str, object]]:
    """Shards as NxD writes them: each factor is split like the weight, or replicated."""
    weights, (a, b) = nxd_shards.model(), adapters()
    # A weight split by rows splits B and replicates A; one split by columns splits A and replicates B.
    columns = [name for name in a if name.endswith(("o_proj.weight", "down_proj.weight"))]
    factors = {name: (a if name in columns else b)[name] for name in a}
    split = nxd_shards.shards({**weights, **factors}, tensor, STAGES)
    found = {}
    for ranks, shard in nxd_shards.shards(weights, tensor, STAGES).items():
        state: dict[str, object] = {"lora_config": CONFIGURATION}
        for key, weight in shard.items():
            layer, _, name = key.rpartition(".")
            if "_proj" not in layer:
                state |= {key: weight} if base else {}
                continue
            state |= {f"{layer}.base_layer.{name}": weight} if base else {}
            by_columns = layer.endswith(("o_proj", "down_proj"))
            first = layer.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj") + ".weight"
            state[f"{layer}.lora_A.weight"] = split[ranks][key] if by_columns else a[first]
            state[f"{layer}.lora_B.{name}"] = b[first] if by_columns else split[ranks][key]
        found[ranks] = state
    return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(nxd_shards.CONFIG))
    return tmp_path


def write(folder, tensor: int, *, base: bool):
    nxd_shards.save(shards(tensor, base=base), FILE, folder)
    (folder / "newest").write_text("step_9")
    return folder


@pytest.mark.parametrize("tensor", [2, 4], ids=["tensor 2", "tensor 4, KV replicated"])
def test_adapters_are_merged_and_written_for_peft(folder, tensor):
    nxd = write(folder / "nxd", tensor, base=True)
    config = folder / "config.json"
    options = ("--config", str(config), "--nxd-layout", "trn1")
    assert main(["convert", str(nxd), str(folder / "peft"), "--to", "peft", *options]) == 0
    a, b = adapters()
    stored = load_file(folder / "peft/adapter_model.safetensors")
    for name, expected in b.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        assert torch.equal(stored.pop(f"{prefix}.lora_A.weight"), a[name]), name
        assert torch.equal(stored.pop(f"{prefix}.lora_B.weight"), expected), name
    assert not stored
    about = json.loads((folder / "peft/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["lora_dropout"]) == (RANK, ALPHA, 0.1)

    merged = [*options, "--adapters", str(nxd)]
    assert main(["convert", str(nxd), str(folder / "hf"), "--to", "hf", *merged]) == 0
    found, weights = load_file(folder / "hf/model.safetensors"), nxd_shards.model()
    for name, weight in weights.items():
        expected = weight
        if name in b:
            expected = (weight.float() + b[name] @ a[name] * (ALPHA / RANK)).bfloat16()
        torch.testing.assert_close(found[name], expected, rtol=1e-2, atol=1e-3)
    again = Options("hf", config, adapters=folder / "peft")
    convert(folder / "hf", folder / "twice", again)  # from PEFT's folder
    assert len([*PeftAdapters(folder / "peft", read_adapters(nxd, config, "trn1").model)]) == 7 * LAYERS


class OfQKV(Adapters):
    """Updates of a layer's queries, keys and values, which share the first factor."""

    def __init__(self, model):
        self.model, self.rank, generator = model, RANK, torch.Generator().manual_seed(1)
        a = torch.randn(RANK, model.hidden_size, generator=generator)
        rows = model.num_attention_heads * model.head_dim
        self.updates = [
            Factors(
                f"layers.1.attention.qkv.{part}.weight", a, torch.randn(rows, RANK, generator=generator), 2.0
            )
            for part in "qkv"
        ]

    def __iter__(self):
        return iter(self.updates)


@pytest.mark.parametrize("name", ["phi3", "gpt_neox"])
def test_updates_of_parts_of_one_tensor_are_written_for_peft_where_they_are_stored(name, tmp_path):
    sizes = {**SIZES, "num_key_value_heads": 4, "head_dim": 10, **CONFIGS[name][-1]}
    model = Model(**from_config_json(AutoConfig.for_model(name, **sizes).to_dict()))
    adapters = OfQKV(model)
    write_peft(adapters, tmp_path)
    again = list(PeftAdapters(tmp_path, model))
    assert [each.tensor for each in again] == [each.tensor for each in adapters]
    assert all(torch.equal(one.b, other.b) for one, other in zip(again, adapters, strict=True))
    (stored,) = (
        tensor
        for key, tensor in load_file(tmp_path / "adapter_model.safetensors").items()
        if ".lora_B." in key
    )
    for each in adapters:
        assert torch.equal(huggingface_tensor(model, each.tensor).read(stored), each.b)


def test_adapters_that_cannot_be_merged_are_rejected(folder, capsys):
    config = folder / "config.json"
    found = shards(2, base=True)
    nxd_shards.save(found, FILE, folder)
    with pytest.raises(ValueError, match="hold LoRA adapters; name them with --adapters"):
        convert(folder / "step_9", folder / "hf", Options("hf", config))
    found[1, 0]["model.layers.0.mlp.gate_up_proj.lora_A.weight"] = torch.zeros(RANK, nxd_shards.HIDDEN)
    nxd_shards.save(found, FILE, folder)
    with pytest.raises(ValueError, match="lora_A should be the same on all tensor ranks, but differs"):
        [*read_adapters(folder / "step_9", config)]
    for state in found.values():
        state["lora_config"] = {**CONFIGURATION, "modules_to_save": ["lm_head"]}
    nxd_shards.save(found, FILE, folder)
    with pytest.raises(ValueError, match=r"fully trained modules \(modules_to_save: \['lm_head'\]\)"):
        read_adapters(folder / "step_9", config)
    for setting, reason in (
        ({"bias": "all"}, "is not supported"),
        ({"use_new": 1}, "is not a known setting"),
    ):
        for state in found.values():
            state["lora_config"] = {**CONFIGURATION, **setting}
        nxd_shards.save(found, FILE, folder)
        with pytest.raises(ValueError, match=rf"pp_rank_00\.pt: {min(setting)} = \w+ {reason}"):
            read_adapters(folder / "step_9", config)
    for state in found.values():
        del state["lora_config"]
    nxd_shards.save(found, FILE, folder)
    with pytest.raises(ValueError, match=r"no lora_config in the shards and no adapter_config\.json"):
        read_adapters(folder / "step_9", config)
    nxd_shards.save(shards(4, base=False), FILE, folder)
    with pytest.raises(ProfileError, match="--nxd-layout: is missing: 2 ranks share each KV head"):
        read_adapters(folder / "step_9", config)
    with pytest.raises(ProfileError, match="does not exist"):
        read_adapters(config.parent / "nothing", config)


def test_merged_weights_have_the_dtype_in_which_the_weights_are_read(folder):
    """As a bf16 run's float32 master weights."""
    nxd, config = write(folder / "nxd", 2, base=True), folder / "config.json"
    weights = formats.read(nxd, config, None, adapters=True)
    merged = read_adapters(nxd, config).merged(Weights(weights.model, weights.parts, torch.float32))
    assert {merged.dtype_of(name) for name in merged.shapes} == {torch.float32}


def test_merge_keeps_the_dtype_of_each_tensor_unless_the_run_has_a_training_dtype(folder):
    config = folder / "config.json"
    found = read_adapters(write(folder / "nxd", 2, base=True), config)
    state = {
        name: tensor.float() if "norm" in name else tensor for name, tensor in nxd_shards.model().items()
    }
    (folder / "hf").mkdir()
    save_file(state, folder / "hf/model.safetensors")
    weights = formats.read(folder / "hf", config, None)
    merged = found.merged(weights)
    stored = {name: weights.dtype_of(name) for name in weights.shapes}
    assert {*stored.values()} == {torch.float32, torch.bfloat16}
    assert {name: merged.dtype_of(name) for name in merged.shapes} == stored
    found.dtype = torch.bfloat16
    merged = found.merged(weights)
    assert {merged.dtype_of(name) for name in merged.shapes} == {torch.bfloat16}


def test_layout_is_required_for_adapters_of_heads_under_megatron_names(folder):
    def save(module: str) -> None:
        name = f"language_model.encoder.layers.0.{module}"
        state = {
            "lora_config": CONFIGURATION,
            f"{name}.lora_A.weight": torch.zeros(RANK, 8),
            f"{name}.lora_B.weight": torch.zeros(8, RANK),
        }
        nxd_shards.save({(t, 0): state for t in range(4)}, FILE, folder)

    for module in ("query", "key_value", "dense"):
        save(f"self_attention.{module}")
        with pytest.raises(ProfileError, match="--nxd-layout: is missing: 2 ranks share each KV head"):
            read_adapters(folder / "step_9", folder / "config.json")
    save("mlp.dense_4h_to_h")
    read_adapters(folder / "step_9", folder / "config.json")


def truncate(peft):
    path = peft / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def without_b(peft):
    path = peft / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "lora_A" in name}, path)


def without(name):
    def write(peft):
        path = peft / "adapter_config.json"
        about = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in about.items() if key != name}))

    return write


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (truncate, r"peft/adapter_model\.safetensors: corrupted"),
        (without_b, r"peft/adapter_model\.safetensors: .*lora_B\.weight is missing"),
        (without("r"), r"peft/adapter_config\.json: r is missing"),
        (without("lora_alpha"), r"peft/adapter_config\.json: lora_alpha is missing"),
        (lambda peft: (peft / "adapter_config.json").write_text("{"), r"adapter_config\.json: corrupted"),
        (lambda peft: (peft / "adapter_config.json").unlink(), r"adapter_config\.json: missing"),
    ],
)
def test_incomplete_adapters_of_peft_are_rejected_by_file(corrupt, message, folder):
    peft = folder / "peft"
    write_peft(read_adapters(write(folder / "nxd", 2, base=False), folder / "config.json"), peft)
    corrupt(peft)
    with pytest.raises(ValueError, match=message):
        read_adapters(peft, folder / "config.json")


def test_adapters_of_nxd_without_rank_are_rejected(folder):
    found = shards(2, base=False)
    for state in found.values():
        state["lora_config"] = {"r": RANK, "lora_alpha": ALPHA}
    nxd_shards.save(found, FILE, folder)
    with pytest.raises(ValueError, match=r"tp_rank_00_pp_rank_00\.pt: lora_rank is missing"):
        read_adapters(folder / "step_9", folder / "config.json")


def test_peft_adapters_that_are_more_than_an_update_of_the_weights_are_rejected(folder):
    from peft import LoraConfig  # imports slowly

    peft = folder / "peft"
    write_peft(read_adapters(write(folder / "nxd", 2, base=False), folder / "config.json"), peft)
    about = json.loads((peft / "adapter_config.json").read_text())
    unknown = (
        "is not a known setting of LoRA, and may change it; merge the adapters with the program that wrote"
    )
    for setting, reason in (
        ({"init_lora_weights": True}, None),
        ({"init_lora_weights": "gaussian"}, None),
        (vars(LoraConfig(target_modules={"q_proj"}, r=RANK, lora_alpha=ALPHA)), None),
        ({"of_a_later_version": False, "another": {}}, None),
        ({"init_lora_weights": "pissa_niter_16"}, "is not supported"),
        ({"init_lora_weights": "loftq"}, "is not supported"),
        ({"alora_invocation_tokens": [5]}, "is not supported"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "is not supported"),
        ({"use_qalora": True}, "is not supported"),
        ({"modules_to_save": ["lm_head"]}, "is not supported"),
        ({"lora_bias": True}, "is not supported"),
        ({"of_a_later_version": 2}, unknown),
    ):
        text = json.dumps(
            {**about, **setting}, default=lambda value: getattr(value, "__dict__", None) or [*value]
        )
        (peft / "adapter_config.json").write_text(text)
        if reason is None:
            read_adapters(peft, folder / "config.json")
            continue
        ((name, value),) = setting.items()
        with pytest.raises(
            ValueError, match=rf"adapter_config\.json: {name} = {re.escape(str(value))} {reason}"
        ):
            read_adapters(peft, folder / "config.json")


@pytest.fixture
def lora_run(tmp_path):
    """The folder of a LoRA run with a checkpoint; the weights that it updates are in `base`."""
    save_trained(tmp_path / "base", Case())
    save_trained(tmp_path / "run/checkpoints/step_1", Case(lora=("qkv",)))
    return tmp_path / "run"


def test_corrupted_adapters_of_a_run_are_rejected(lora_run):
    saved = lora_run / "checkpoints/step_1"
    [*read_adapters(lora_run)]
    box = Reader(saved).tensors[f"{native.PREFIX}.layers.0.attention.qkv.lora.b.q.weight"].boxes[0]
    flip(saved / box.file, box.start + box.length // 2)
    with pytest.raises(locations.CorruptCheckpoint, match=f"{box.file}: corrupted"):
        [*read_adapters(lora_run)]


def test_merge_of_a_run_is_the_same_conversion_while_the_run_continues(lora_run, tmp_path):
    options = Options("hf", adapters=lora_run)
    record = convert(tmp_path / "base", tmp_path / "merged", options)
    (lora_run / "metrics.jsonl").write_text("{}")
    assert convert(tmp_path / "base", tmp_path / "merged", options) == record


def test_merge_of_a_run_writes_the_model_that_it_trained(lora_run, tmp_path, caplog):
    marker = lora_run / "checkpoints/step_1/complete.json"
    about = json.loads(marker.read_text())
    profile = about["profile"]

    def run_with(**model: object) -> None:
        changed = {
            **profile,
            "model": profile["model"] | model,
            "train": profile["train"] | {"precision": "bf16"},
        }
        marker.write_text(json.dumps({**about, "profile": changed}))

    def written(name: str, to: str = "hf", config: str | None = None) -> float:
        options = Options(to, config and tmp_path / config, adapters=lora_run)
        convert(tmp_path / "base", tmp_path / name, options)
        return formats.read(tmp_path / name, None, None).model.rope_theta

    convert(tmp_path / "base", tmp_path / "hf", Options("hf"))
    run_with(rope_theta=5e5)
    assert written("merged") == 5e5
    assert not caplog.records
    assert written("named", config="hf") == 1e4
    assert "model.rope_theta is 500000.0 in the adapters' model, 10000.0 in the config" in caplog.text
    assert written("checkpoint", to="trainshed") == 5e5
    stored = Reader(tmp_path / "checkpoint").tensors.values()
    assert {tensor.dtype for tensor in stored} == {torch.float32}  # the precision of the base, not of the run

    heads = profile["model"]["num_attention_heads"]
    run_with(num_attention_heads=heads // 2, head_dim=2 * profile["model"]["head_dim"])
    with pytest.raises(
        ValueError, match=rf"another model.*num_attention_heads is {heads // 2} in .*, {heads}"
    ):
        written("other")
