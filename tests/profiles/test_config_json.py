"""A profile that takes its model from a config.json."""

import json

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from profiles.huggingface.config import read_config_json, to_config_json
from profiles.sections.model import Model
from tests.profiles.sections.test_model import LLAMA

CHUNKED = '{"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": ["chunked"]}'


def test_profile_overrides_its_config_json_which_replaces_the_extended_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_config_json(Model(**LLAMA))))
    profile = resolve.load("tiny").model_dump(mode="json")
    sections = {name: section for name, section in profile.items() if name != "model"}
    path = tmp_path / "mine.yaml"
    # JSON is YAML; the config's path counts from the profile's file.
    path.write_text(json.dumps({**sections, "model": {"config": "config.json", "num_hidden_layers": 5}}))
    model = resolve.load(str(path)).model
    assert model == Model(**{**LLAMA, "num_hidden_layers": 5})
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(to_config_json(Model(**{**LLAMA, "hidden_size": 32}))))
    below = tmp_path / "below.yaml"
    below.write_text(json.dumps({"extends": "./mine.yaml", "model": {"config": "other"}}))
    replaced = Model(**{**LLAMA, "hidden_size": 32})
    assert resolve.load(str(below)).model == replaced
    assert resolve.load(str(path), [f"model.config={other}"]).model == replaced
    later = resolve.load("tiny", ["model.num_hidden_layers=3", f"model.config={other}"]).model
    assert later == Model(**{**LLAMA, "hidden_size": 32, "num_hidden_layers": 3})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"model_type": "mamba"}', "is not a supported architecture"),
        ('{"model_type": "gpt_oss"}', "cannot be used: KeyError('num_hidden_layers')"),
        (CHUNKED, "cannot be used: layer_types = chunked"),
        ('{"model_type": "llama", "rope_theta": null}', "cannot be used: TypeError"),
        ('{"model_type": "llama", "rope_scaling": [1]}', "cannot be used: AttributeError"),
        ('{"model_type": "dbrx", "attn_config": [1]}', "cannot be used: AttributeError"),
    ],
)
def test_unusable_config_json_is_rejected(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ProfileError) as caught:
        resolve.load("tiny", [f"model.config={tmp_path}"])
    assert caught.value.key == "model.config"
    assert message in str(caught.value)


def test_config_json_may_have_a_byte_order_mark(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_config_json(Model(**LLAMA))), encoding="utf-8-sig")
    assert Model(**read_config_json(path, "model.config")) == Model(**LLAMA)
