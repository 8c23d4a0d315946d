"""Where secrets come from: the environment, else a Secret block of Prefect. They are handed on, never stored or shown."""

from __future__ import annotations

import os

from profiles.schema import Profile

HUB_BLOCK = "hugging-face-token"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # as the hub's own client looks for it


def hub_token(profile: Profile) -> str | None:
    """The Hugging Face token, for a profile whose data, tokenizer or weights come from somewhere else than a folder here.

    None leaves it to the hub's own client, which knows `hf auth login`.
    """
    data = any(
        source.kind == "hub" or (source.path or "").startswith("hf://") for source in profile.data.sources
    )
    if not data and profile.tokenizer.source == "train" and profile.init.from_ is None:
        return None
    # Also the environment's is handed on by name: a job's environment has none unless it is given one.
    for name in VARIABLES:
        if token := os.environ.get(name, "").strip():
            return token
    from prefect.blocks.system import Secret

    try:
        return Secret.load(HUB_BLOCK).get()
    except ValueError:  # there is no such block
        return None
