"""Where secrets come from: the environment, else a Secret block of Prefect. They are handed on, never stored or shown."""

from __future__ import annotations

import os

from profiles.schema import Profile

HUB_BLOCK = "hugging-face-token"


def hub_token(profile: Profile) -> str | None:
    """The Hugging Face token, for a profile that takes its tokenizer or weights from somewhere else than a folder here.

    None leaves it to the hub's own client, which knows HF_TOKEN and `hf auth login`.
    """
    if profile.tokenizer.source == "train" and profile.init.from_ is None:
        return None
    if os.environ.get("HF_TOKEN"):
        return None
    from prefect.blocks.system import Secret

    try:
        return Secret.load(HUB_BLOCK).get()
    except ValueError:  # there is no such block
        return None
