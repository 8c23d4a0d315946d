"""NxD's shards: every form reads to the same weights, what is written is what NxD writes, defects are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.conversion import formats, huggingface, nxd_files
from modeling.conversion.convert import Options, convert
from modeling.conversion.weights import Weights
from profiles.errors import ProfileError
from tests.modeling import nxd_shards as by_hand

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nxd"
CASES = sorted(path.name for path in FIXTURES.iterdir())
TWO_STAGES = [range(2), range(2, 4)]
ONE_STAGE = [range(4)]
FILE = "model/dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt"


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(by_hand.CONFIG))
    return path


def expect(weights: Weights, model: dict[str, torch.Tensor]) -> None:
    """Assert that the weights written as Hugging Face tensors are `model`, bit for bit."""
    found = {
        entry.name: torch.cat(list(entry.rows(0, entry.shape[0]))) for entry in huggingface.entries(weights)
    }
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_fixtures_convert_to_their_hugging_face_tensors_and_back(case, tmp_path):
    about = json.loads((FIXTURES / case / "layout.json").read_text())
    degrees = {"tensor": about["tp_size"], "pipeline": about["pp_size"]}
    source, config = FIXTURES / case / "nxd", FIXTURES / case / "hf"
    layout = about["hw_backend"] if about["kv_size_multiplier"] > 1 else None
    convert(source, tmp_path / "hf", Options("hf", config, nxd_layout=layout))
    found, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "hf", config))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    convert(tmp_path / "hf", tmp_path / "trainshed", Options("trainshed", tensor=2, pipeline=2))
    convert(tmp_path / "trainshed", tmp_path / "nxd", Options("nxd", **degrees))
    for path in sorted((source / "model").glob("dp_rank_00_tp_rank_??_pp_rank_??.pt")):
        theirs = nxd_files.torch_files.read(path)
        ours = torch.load(tmp_path / "nxd" / "model" / path.name, weights_only=True)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype
            assert torch.equal(tensor, theirs[name].open()), name


FORMS = {
    "one rank": (1, ONE_STAGE, "separate"),
    "several KV heads a rank, fused": (2, ONE_STAGE, "fused"),
    "replicated": (4, TWO_STAGES, "separate"),
    "replicated, fused": (4, ONE_STAGE, "fused"),
    "one query head a rank": (8, ONE_STAGE, "separate"),
    "the run's own cuts": (2, [range(3), range(3, 4)], "separate"),
    "coalesced": (2, ONE_STAGE, "coalesced"),
}


@pytest.mark.parametrize(("tensor", "stages", "form"), FORMS.values(), ids=FORMS.keys())
def test_every_form_reads_to_the_same_weights(tensor, stages, form, config, tmp_path):
    model = by_hand.model()
    by_hand.save(by_hand.shards(model, tensor, stages, form), FILE, tmp_path / "nxd")
    expect(formats.read(tmp_path / "nxd", config, "trn1"), model)


@pytest.mark.parametrize(
    "pattern",
    [
        "tp_rank_{t:02}_pp_rank_{p:02}",
        "tp_rank_{t:02}_pp_rank_{p:02}/checkpoint.pt",
        "dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt",
        "step_7/model/dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt",
    ],
)
def test_files_are_found_under_all_their_names(pattern, config, tmp_path):
    model = by_hand.model()
    folder = by_hand.save(by_hand.shards(model, 2, TWO_STAGES), pattern, tmp_path / "nxd")
    if "step_7" in pattern:
        (folder / "newest").write_text("step_7\n")
        torch.save({"state": {}}, folder / "step_7" / "scheduler.pt")
    expect(formats.read(folder, config, None), model)


def test_megatrons_names(config, tmp_path):
    model = by_hand.model()
    held = {ranks: by_hand.megatron(state) for ranks, state in by_hand.shards(model, 4, TWO_STAGES).items()}
    expect(formats.read(by_hand.save(held, FILE, tmp_path / "nxd"), config, "trn1"), model)


def test_the_full_state_in_one_file(config, tmp_path):
    torch.save({"model": by_hand.model()}, tmp_path / "checkpoint.pt")
    expect(formats.read(tmp_path, config, None), by_hand.model())


def test_xser_needs_no_information_file(tmp_path):
    case = FIXTURES / "xser-tp4-kv2"
    shutil.copytree(case / "nxd", tmp_path / "nxd")
    for path in (tmp_path / "nxd" / "model").glob("*.info.pt"):
        path.unlink()
    expect(formats.read(tmp_path / "nxd", case / "hf", "trn1"), load_file(case / "hf" / "model.safetensors"))


@pytest.mark.parametrize("form", ["separate", "fused"])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_written_shards_are_those_of_the_description(tensor, form, config, tmp_path):
    model = by_hand.model()
    expected = by_hand.shards(model, tensor, TWO_STAGES, form)
    one = by_hand.save(by_hand.shards(model, 2, ONE_STAGE), FILE, tmp_path / "source")
    convert(one, tmp_path / "nxd", Options("nxd", config, tensor=tensor, pipeline=2, nxd_qkv=form))
    for (t, p), state in expected.items():
        written = torch.load(tmp_path / "nxd" / FILE.format(t=t, p=p), weights_only=True)
        assert written.keys() == state.keys()
        assert all(torch.equal(written[name], state[name]) for name in state)


def test_every_ranks_query_heads_meet_their_own_kv_head(config, tmp_path):
    """What a round trip cannot show: read as it lies, rank by rank, each query head is beside the KV head of its group."""
    model = by_hand.model()
    source = by_hand.save(by_hand.shards(model, 2, ONE_STAGE), FILE, tmp_path / "source")
    convert(source, tmp_path / "nxd", Options("nxd", config, tensor=8, pipeline=1))
    prefix, d = "model.layers.1.self_attn", by_hand.D
    q, k, v = (model[f"{prefix}.{letter}_proj.weight"].split(d) for letter in "qkv")
    o = model[f"{prefix}.o_proj.weight"].split(d, 1)
    seen = set()
    for rank in range(8):
        state = torch.load(tmp_path / "nxd" / FILE.format(t=rank, p=0), weights_only=True)
        head = next(i for i, each in enumerate(q) if torch.equal(each, state[f"{prefix}.qkv_proj.weight_q"]))
        group = head // (by_hand.HEADS // by_hand.KV_HEADS)
        assert torch.equal(state[f"{prefix}.qkv_proj.weight_k"], k[group])
        assert torch.equal(state[f"{prefix}.qkv_proj.weight_v"], v[group])
        assert torch.equal(state[f"{prefix}.o_proj.weight"], o[head])
        seen.add(head)
    assert seen == set(range(by_hand.HEADS))


def test_trn2_is_merged_in_natural_order_and_never_written(config, tmp_path):
    model = by_hand.model()
    folder = by_hand.save(by_hand.shards(model, 4, ONE_STAGE, layout="trn2"), FILE, tmp_path / "nxd")
    expect(formats.read(folder, config, "trn2"), model)
    with pytest.raises(AssertionError, match=r"q_proj|o_proj"):  # the control: it matters
        expect(formats.read(folder, config, "trn1"), model)
    with pytest.raises(ProfileError, match=r"--nxd-layout = trn2: .*another group; nearest valid: trn1"):
        convert(folder, tmp_path / "out", Options("nxd", config, tensor=4, nxd_layout="trn2"))
    assert not (tmp_path / "out").exists()


def test_the_layout_must_be_said_where_it_matters(config, tmp_path):
    folder = by_hand.save(by_hand.shards(by_hand.model(), 4, ONE_STAGE), FILE, tmp_path / "nxd")
    with pytest.raises(ProfileError, match=r"--nxd-layout: .*cannot show.*: trn1, trn2"):
        formats.read(folder, config, None)


def test_shards_without_a_configuration_are_refused(tmp_path):
    folder = by_hand.save(by_hand.shards(by_hand.model(), 2, ONE_STAGE), FILE, tmp_path / "nxd")
    with pytest.raises(ProfileError, match="--config: is missing"):
        formats.read(folder, None, None)


def too_many_replicas(held):
    return by_hand.shards(by_hand.model(), 2, ONE_STAGE, multiplier=2)


def half_of_q(held):
    for state in held.values():
        for name, tensor in state.items():
            if name.endswith("weight_q"):
                state[name] = tensor[: len(tensor) // 2].clone()
            elif name.endswith("o_proj.weight"):
                state[name] = tensor[:, : tensor.shape[1] // 2].clone()
    return held


def without(name):
    return lambda held: {ranks: {n: t for n, t in s.items() if n != name} for ranks, s in held.items()}


def with_another(name):
    return lambda held: {ranks: {**state, name: torch.ones(3)} for ranks, state in held.items()}


def whole_numbers(held):
    held[0, 0]["model.norm.weight"] = held[0, 0]["model.norm.weight"].int()
    return held


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (too_many_replicas, "repeat 2 KV heads 2 times, which is more than their 2 tensor ranks"),
        (half_of_q, "hold 4 of the model's 8 query heads"),
        (without("model.layers.2.mlp.down_proj.weight"), r"missing: layers\.2\.mlp\.down\.weight"),
        (with_another("model.layers.0.self_attn.extra"), r"self_attn\.extra is not a tensor of NxD's Llama"),
        (with_another("model.layers.4.mlp.down_proj.weight"), r"layers\.4.* is not a tensor of this model"),
        (whole_numbers, r"norm\.weight is of type int32"),
        (
            lambda held: {ranks: held[ranks] for ranks in held if ranks != (1, 0)},
            "1 are missing|3 query heads|4 of",
        ),
    ],
)
def test_what_nxd_loses_is_refused_by_name(damage, message, config, tmp_path):
    held = damage(by_hand.shards(by_hand.model(), 2, ONE_STAGE))
    with pytest.raises(ValueError, match=message):
        formats.read(by_hand.save(held, FILE, tmp_path / "nxd"), config, "trn1")


def test_a_missing_ranks_file_is_named(config, tmp_path):
    folder = by_hand.save(by_hand.shards(by_hand.model(), 2, TWO_STAGES), FILE, tmp_path / "nxd")
    (folder / FILE.format(t=0, p=1)).unlink()
    with pytest.raises(ValueError, match="tensor rank 0, pipeline rank 1"):
        formats.read(folder, config, None)


def test_a_hostile_file_is_refused_and_nothing_of_it_runs(config, tmp_path):
    held = by_hand.shards(by_hand.model(), 2, ONE_STAGE)
    held[1, 0]["model.norm.weight"] = by_hand.Hostile(tmp_path / "ran")
    folder = by_hand.save(held, FILE, tmp_path / "nxd")
    with pytest.raises(
        ValueError, match=r"tp_rank_01_pp_rank_00\.pt is refused: it would run .*touch|getattr"
    ):
        formats.read(folder, config, "trn1")
    assert not (tmp_path / "ran").exists()


def test_a_hostile_tensor_of_the_xser_form_is_refused(tmp_path):
    case = FIXTURES / "xser-tp4-kv2"
    shutil.copytree(case / "nxd", tmp_path / "nxd")
    path = tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt.tensors" / "tensor_3.pt"
    torch.save(by_hand.Hostile(tmp_path / "ran"), path)
    with pytest.raises(ValueError, match=r"tensor_3\.pt is refused"):
        formats.read(tmp_path / "nxd", case / "hf", "trn1")
    assert not (tmp_path / "ran").exists()


def test_a_reference_leads_to_no_other_file(monkeypatch, tmp_path):
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
    with pytest.raises(ValueError, match=r"refers to '0/../../../elsewhere', which is no tensor's number"):
        torch_files.read(path)
