"""NxD shards: all forms read to the same weights, written shards equal NxD's, defects are rejected."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.conversion import formats, huggingface
from modeling.conversion.convert import Options, convert
from modeling.conversion.nxd import files as nxd_files
from modeling.conversion.weights import Weights
from profiles.errors import ProfileError
from tests.modeling.conversion.nxd import nxd_shards

FIXTURES = Path(__file__).parents[3] / "fixtures" / "nxd"
CASES = sorted(path.name for path in FIXTURES.iterdir())
TWO_STAGES = [range(2), range(2, 4)]
ONE_STAGE = [range(4)]
FILE = "model/dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt"


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(nxd_shards.CONFIG))
    return path


def assert_equal(weights: Weights, model: dict[str, torch.Tensor]) -> None:
    """Assert that the weights written as Hugging Face tensors are `model`, bit for bit."""
    found = {
        entry.name: torch.cat(list(entry.rows(0, entry.shape[0]))) for entry in huggingface.entries(weights)
    }
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_fixtures_round_trip_through_hugging_face(case, tmp_path):
    settings = json.loads((FIXTURES / case / "layout.json").read_text())
    degrees = {"tensor": settings["tp_size"], "pipeline": settings["pp_size"]}
    source, config = FIXTURES / case / "nxd", FIXTURES / case / "hf"
    layout = settings["hw_backend"] if settings["kv_size_multiplier"] > 1 else None
    convert(source, tmp_path / "hf", Options("hf", config, nxd_layout=layout))
    found, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "hf", config))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    convert(tmp_path / "hf", tmp_path / "trainshed", Options("trainshed", tensor=2, pipeline=2))
    convert(tmp_path / "trainshed", tmp_path / "nxd", Options("nxd", **degrees))
    for path in sorted((source / "model").glob("dp_rank_00_tp_rank_??_pp_rank_??.pt")):
        expected_tensors = nxd_files.torch_files.read(path)
        written = torch.load(tmp_path / "nxd" / "model" / path.name, weights_only=True)
        assert written.keys() == expected_tensors.keys()
        for name, tensor in written.items():
            assert tensor.dtype == expected_tensors[name].dtype
            assert torch.equal(tensor, expected_tensors[name].open()), name


FORMS = {
    "one rank": (1, ONE_STAGE, "separate"),
    "several KV heads per rank, fused": (2, ONE_STAGE, "fused"),
    "replicated": (4, TWO_STAGES, "separate"),
    "replicated, fused": (4, ONE_STAGE, "fused"),
    "one query head per rank": (8, ONE_STAGE, "separate"),
    "explicit pipeline cuts": (2, [range(3), range(3, 4)], "separate"),
    "coalesced": (2, ONE_STAGE, "coalesced"),
}


@pytest.mark.parametrize(("tensor", "stages", "form"), FORMS.values(), ids=FORMS.keys())
def test_every_form_reads_to_the_same_weights(tensor, stages, form, config, tmp_path):
    model = nxd_shards.model()
    nxd_shards.save(nxd_shards.shards(model, tensor, stages, form), FILE, tmp_path / "nxd")
    assert_equal(formats.read(tmp_path / "nxd", config, "trn1"), model)


@pytest.mark.parametrize(
    "pattern",
    [
        "tp_rank_{t:02}_pp_rank_{p:02}",
        "tp_rank_{t:02}_pp_rank_{p:02}/checkpoint.pt",
        "dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt",
        "step_7/model/dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt",
    ],
)
def test_all_file_name_patterns_are_found(pattern, config, tmp_path):
    model = nxd_shards.model()
    folder = nxd_shards.save(nxd_shards.shards(model, 2, TWO_STAGES), pattern, tmp_path / "nxd")
    if "step_7" in pattern:
        (folder / "newest").write_text("step_7\n")
        torch.save({"state": {}}, folder / "step_7" / "scheduler.pt")
    assert_equal(formats.read(folder, config, None), model)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_reads_megatron_names(architecture, config, tmp_path):
    config.write_text(json.dumps({**nxd_shards.CONFIG, "model_type": architecture}))
    model = nxd_shards.model()
    shards = {
        ranks: nxd_shards.with_megatron_names(state)
        for ranks, state in nxd_shards.shards(model, 4, TWO_STAGES).items()
    }
    assert_equal(formats.read(nxd_shards.save(shards, FILE, tmp_path / "nxd"), config, "trn1"), model)


@pytest.mark.parametrize("beside", [{}, {"rng_state": torch.ones(3)}], ids=["alone", "beside a tensor"])
def test_reads_the_full_state_from_one_file(beside, config, tmp_path):
    torch.save({"model": nxd_shards.model(), **beside}, tmp_path / "checkpoint.pt")
    assert_equal(formats.read(tmp_path, config, None), nxd_shards.model())


def test_reads_xser_without_info_files(tmp_path):
    case = FIXTURES / "xser-tp4-kv2"
    shutil.copytree(case / "nxd", tmp_path / "nxd")
    for path in (tmp_path / "nxd" / "model").glob("*.info.pt"):
        path.unlink()
    assert_equal(
        formats.read(tmp_path / "nxd", case / "hf", "trn1"), load_file(case / "hf" / "model.safetensors")
    )


@pytest.mark.parametrize("form", ["separate", "fused"])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_written_shards_match_the_format_description(tensor, form, config, tmp_path):
    model = nxd_shards.model()
    expected = nxd_shards.shards(model, tensor, TWO_STAGES, form)
    one = nxd_shards.save(nxd_shards.shards(model, 2, ONE_STAGE), FILE, tmp_path / "source")
    convert(one, tmp_path / "nxd", Options("nxd", config, tensor=tensor, pipeline=2, nxd_qkv=form))
    for (t, p), state in expected.items():
        written = torch.load(tmp_path / "nxd" / FILE.format(t=t, p=p), weights_only=True)
        assert written.keys() == state.keys()
        assert all(torch.equal(written[name], state[name]) for name in state)


def test_written_query_heads_are_on_the_rank_of_their_kv_head(config, tmp_path):
    """In each rank's file, query heads come with their group's KV head; a round trip cannot show this."""
    model = nxd_shards.model()
    source = nxd_shards.save(nxd_shards.shards(model, 2, ONE_STAGE), FILE, tmp_path / "source")
    convert(source, tmp_path / "nxd", Options("nxd", config, tensor=8, pipeline=1))
    prefix, d = "model.layers.1.self_attn", nxd_shards.D
    q, k, v = (model[f"{prefix}.{letter}_proj.weight"].split(d) for letter in "qkv")
    o = model[f"{prefix}.o_proj.weight"].split(d, 1)
    seen = set()
    for rank in range(8):
        state = torch.load(tmp_path / "nxd" / FILE.format(t=rank, p=0), weights_only=True)
        head = next(i for i, rows in enumerate(q) if torch.equal(rows, state[f"{prefix}.qkv_proj.weight_q"]))
        group = head // (nxd_shards.HEADS // nxd_shards.KV_HEADS)
        assert torch.equal(state[f"{prefix}.qkv_proj.weight_k"], k[group])
        assert torch.equal(state[f"{prefix}.qkv_proj.weight_v"], v[group])
        assert torch.equal(state[f"{prefix}.o_proj.weight"], o[head])
        seen.add(head)
    assert seen == set(range(nxd_shards.HEADS))


def test_trn2_is_merged_in_natural_order_and_not_written(config, tmp_path):
    model = nxd_shards.model()
    folder = nxd_shards.save(nxd_shards.shards(model, 4, ONE_STAGE, layout="trn2"), FILE, tmp_path / "nxd")
    assert_equal(formats.read(folder, config, "trn2"), model)
    with pytest.raises(AssertionError, match=r"q_proj|o_proj"):  # negative control
        assert_equal(formats.read(folder, config, "trn1"), model)
    with pytest.raises(ProfileError, match=r"--nxd-layout = trn2: .*another group.*; nearest valid: trn1"):
        convert(folder, tmp_path / "out", Options("nxd", config, tensor=4, nxd_layout="trn2"))
    assert not (tmp_path / "out").exists()


def test_layout_is_required_with_shared_kv_heads(config, tmp_path):
    folder = nxd_shards.save(nxd_shards.shards(nxd_shards.model(), 4, ONE_STAGE), FILE, tmp_path / "nxd")
    with pytest.raises(ProfileError, match=r"--nxd-layout: .*do not show.*: trn1, trn2"):
        formats.read(folder, config, None)


def test_shards_without_config_are_rejected(tmp_path):
    folder = nxd_shards.save(nxd_shards.shards(nxd_shards.model(), 2, ONE_STAGE), FILE, tmp_path / "nxd")
    with pytest.raises(ProfileError, match="--config: is missing"):
        formats.read(folder, None, None)


def too_many_replicas(shards):
    return nxd_shards.shards(nxd_shards.model(), 2, ONE_STAGE, multiplier=2)


def half_of_q(shards):
    for state in shards.values():
        for name, tensor in state.items():
            if name.endswith("weight_q"):
                state[name] = tensor[: len(tensor) // 2].clone()
            elif name.endswith("o_proj.weight"):
                state[name] = tensor[:, : tensor.shape[1] // 2].clone()
    return shards


def without(name):
    return lambda shards: {ranks: {n: t for n, t in s.items() if n != name} for ranks, s in shards.items()}


def with_another(name):
    return lambda shards: {ranks: {**state, name: torch.ones(3)} for ranks, state in shards.items()}


def integer_norm(shards):
    shards[0, 0]["model.norm.weight"] = shards[0, 0]["model.norm.weight"].int()
    return shards


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (too_many_replicas, "repeat 2 KV heads 2 times, more than their 2 tensor ranks"),
        (half_of_q, "hold 4 of the model's 8 query heads"),
        (
            without("model.layers.2.mlp.down_proj.weight"),
            r"missing: model\.layers\.2\.mlp\.down_proj\.weight",
        ),
        (
            with_another("model.layers.0.self_attn.extra"),
            r"self_attn\.extra: not a tensor of an NxD model that is supported",
        ),
        (with_another("model.layers.4.mlp.down_proj.weight"), r"layers\.4.*: not a tensor of this model"),
        (integer_norm, r"norm\.weight: dtype int32"),
        (
            lambda shards: {ranks: shards[ranks] for ranks in shards if ranks != (1, 0)},
            "4 of the model's 8 query heads",
        ),
    ],
)
def test_incomplete_or_unknown_tensors_are_rejected_by_name(corrupt, message, config, tmp_path):
    shards = corrupt(nxd_shards.shards(nxd_shards.model(), 2, ONE_STAGE))
    with pytest.raises(ValueError, match=message):
        formats.read(nxd_shards.save(shards, FILE, tmp_path / "nxd"), config, "trn1")


def test_missing_file_of_a_rank_is_named(config, tmp_path):
    folder = nxd_shards.save(nxd_shards.shards(nxd_shards.model(), 2, TWO_STAGES), FILE, tmp_path / "nxd")
    (folder / FILE.format(t=0, p=1)).unlink()
    with pytest.raises(ValueError, match="tensor rank 0, pipeline rank 1"):
        formats.read(folder, config, None)


def test_malicious_file_is_rejected_without_running(config, tmp_path):
    shards = nxd_shards.shards(nxd_shards.model(), 2, ONE_STAGE)
    shards[1, 0]["model.norm.weight"] = nxd_shards.Hostile(tmp_path / "ran")
    folder = nxd_shards.save(shards, FILE, tmp_path / "nxd")
    with pytest.raises(
        ValueError, match=r"tp_rank_01_pp_rank_00\.pt: rejected: it would run .*touch|getattr"
    ):
        formats.read(folder, config, "trn1")
    assert not (tmp_path / "ran").exists()


def test_malicious_xser_tensor_is_rejected(tmp_path):
    case = FIXTURES / "xser-tp4-kv2"
    shutil.copytree(case / "nxd", tmp_path / "nxd")
    path = tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt.tensors" / "tensor_3.pt"
    torch.save(nxd_shards.Hostile(tmp_path / "ran"), path)
    with pytest.raises(ValueError, match=r"tensor_3\.pt: rejected"):
        formats.read(tmp_path / "nxd", case / "hf", "trn1")
    assert not (tmp_path / "ran").exists()


def test_xser_reference_cannot_name_another_file(monkeypatch, tmp_path):
    from modeling.conversion import torch_files

    reference = torch_files.TensorReference()
    reference.tid = "0/../../../elsewhere"
    torch.save(torch.ones(2), tmp_path / "elsewhere.pt")
    path = tmp_path / "shard.pt"
    monkeypatch.setattr(torch_files.TensorReference, "__module__", "torch_xla.utils.serialization")
    import sys
    import types

    for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torch_xla.utils.serialization"].TensorReference = torch_files.TensorReference
    torch.save({"model.norm.weight": reference}, path)
    with pytest.raises(ValueError, match=r"refers to '0/../../../elsewhere', which is not a tensor number"):
        torch_files.read(path)
