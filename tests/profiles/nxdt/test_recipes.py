"""Import of configs that name only a part: HyperPod recipes, and models without config.json."""

import json

import pytest

from profiles import nxdt, resolve
from profiles.errors import ProfileError
from profiles.nxdt.translation import Effect
from tests.profiles.nxdt.test_nxdt import merged, write

RECIPE = {
    "run": {"results_dir": "${base_results_dir}/${.name}", "name": "garden"},
    "exp_manager": {"exp_dir": None, "explicit_log_dir": "${base_results_dir}/logs"}
    | {"resume_if_exists": "${recipes.run.resume}"}
    | {"summary_writer_kwargs": {"save_dir": "${recipes.exp_manager.exp_dir}/tensorboard"}}
    | {"checkpoint_callback_params": {"every_n_train_steps": "${save_every}", "save_top_k": 2}},
    "data": {"train_dir": None, "val_dir": "${recipes.run.val_dir}", "tokenizer": {"type": "${recipes.run.model}"}},
    "model": {"model_config": None, "optim": {"sched": {"max_steps": "${recipes.trainer.max_steps}"}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "over", "kind"),
    [
        ("hf_llama3_8B", {}, "tokens"),
        (
            "hf_llama3_8B_SFT",
            {"data": {"train_dir": "${recipes.run.train_dir}", "val_dir": "/fsx/v"}},
            "files",
        ),
    ],
)
def test_recipe_of_a_launcher_is_imported_and_what_it_lacks_is_to_do(tmp_path, name, over, kind):
    imported = nxdt.import_config(write(tmp_path, name, merged(RECIPE, over)))
    to_do = {line.key: line.note for line in imported.of(Effect.TO_DO)}
    undefined = "${base_results_dir} refers to an undefined key; nearest: "
    for key in ("run.results_dir", "exp_manager.explicit_log_dir"):
        assert to_do[key].startswith(undefined)
    every = to_do["exp_manager.checkpoint_callback_params.every_n_train_steps"]
    assert every.startswith("${save_every} refers to an undefined key")
    assert every.endswith("; 0 is used instead")
    assert "${recipes.run.model} refers to an undefined key" in to_do["data.tokenizer.type"]
    assert "the published llama3-8b" in to_do["model.model_config"]
    assert "no other key names training data; set data.sources" in to_do["data.train_dir"]
    assert not to_do.keys() & {"exp_manager.summary_writer_kwargs.save_dir", "model.optim.sched.max_steps"}
    path = tmp_path / "profile.yaml"
    path.write_text(imported.text())
    profile = resolve.load(str(path))
    assert profile.checkpoint.resume == "newest"
    train, *_ = profile.data.sources
    assert (train.kind, train.path) == (kind, over["data"]["train_dir"] if over else "TRAINING_DATA")


@pytest.mark.parametrize(
    ("over", "known"),
    [({}, True), ({"num_layers": 30}, True), ({"rope_theta": 1e6}, False), ({"hidden_size": 5120}, False)],
)
def test_mistral_is_not_taken_for_a_llama_of_its_size(tmp_path, over, known):
    own = {"rope_theta": None, "max_position_embeddings": 8192, "model_config": "/fsx/mistral-7b/config.json"}
    config = write(tmp_path, "hf_llama3_8B", {"model": {**own, **over}})
    if known:
        model = nxdt.import_config(config).values["model"]
        assert (model["architecture"], model["sliding_window"], model["vocab_size"]) == (
            "mistral",
            4096,
            32000,
        )
    else:
        with pytest.raises(ProfileError, match=r"architecture mistral\); pass --config FILE"):
            nxdt.import_config(config)
    own |= {"num_kv_heads": 8, "num_attention_heads": 32, "vocab_size": 32000, "ffn_hidden_size": 14336}
    stated = nxdt.import_config(write(tmp_path, "hf_llama3_8B", {"model": {**own, **over}}))
    assert stated.values["model"]["architecture"] == "mistral"
    assert "set model.sliding_window" in next(
        line.note for line in stated.lines if line.key == "model.model_config"
    )


def test_config_json_decides_the_model(tmp_path):
    numbers = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    numbers |= {
        "num_attention_heads": 4,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-4,
    }
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(numbers))
    own = {"hidden_size": 64, "num_layers": 3, "max_position_embeddings": 256, "rope_theta": 2e4}
    for given, path in (("other/config.json", None), ("/no/where.json", tmp_path / "other" / "config.json")):
        over = {"model": {**own, "model_config": given}}
        model = nxdt.import_config(write(tmp_path, "hf_llama_7B", over), path).values["model"]
        assert (model["num_hidden_layers"], model["max_position_embeddings"], model["rope_theta"]) == (
            3,
            256,
            2e4,
        )
        assert (model["intermediate_size"], model["vocab_size"], model["norm_eps"]) == (128, 300, 1e-4)
    with pytest.raises(ProfileError, match=r"--config = .*nope.json: there is no file"):
        nxdt.import_config(write(tmp_path, "hf_llama_7B"), tmp_path / "nope.json")
