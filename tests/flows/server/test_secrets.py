"""The hub token is given to profiles that read from the hub, whatever its origin."""

import json

import pytest

from flows.server.secrets import hub_token
from profiles import resolve

HUB = json.dumps([{"kind": "hub", "repository": "org/texts"}])
HUB_FILES = json.dumps([{"kind": "files", "path": "hf://datasets/org/texts/*.jsonl"}])


@pytest.mark.parametrize(
    "override",
    [
        f"data.sources={HUB}",
        f"data.sources={HUB_FILES}",
        "tokenizer.source=org/words",
        "init.from=org/weights",
    ],
)
@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_hub_profile_gets_the_environments_token(monkeypatch, override, variable):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv(variable, "hf_planted\n")
    assert hub_token(resolve.load("tiny", [override])) == "hf_planted"


def test_profile_without_hub_gets_no_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    assert hub_token(resolve.load("tiny")) is None
