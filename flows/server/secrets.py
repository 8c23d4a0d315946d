"""The Hugging Face token, from the environment or a Prefect Secret block; never stored or shown."""

from __future__ import annotations

import os
from typing import Any

from profiles.schema import Profile

HUB_BLOCK = "hugging-face-token"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # in the order of huggingface_hub


def without_tokens() -> dict[str, str]:
    """This process's environment without hub tokens."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


def hub_token(profile: Profile) -> str | None:
    """The token for a profile whose data, tokenizer or weights come from the hub, else None.

    Also None if no token is set: huggingface_hub then uses the token of `hf auth login`.
    """
    sources = profile.data.sources
    data = any(source.kind == "hub" or (source.path or "").startswith("hf://") for source in sources)
    if not data and profile.tokenizer.source == "train" and profile.init.from_ is None:
        return None
    for name in VARIABLES:  # not left to huggingface_hub: jobs do not inherit them
        if token := os.environ.get(name, "").strip():
            return token
    from prefect.blocks.system import Secret
    from prefect.exceptions import ObjectNotFound

    try:
        block: Any = Secret.load(HUB_BLOCK)  # outside of an event loop, no coroutine, as its type says
    except ValueError as error:
        if isinstance(error.__cause__, ObjectNotFound):
            return None  # there is no such block
        raise
    secret: str | None = block.get()
    return secret
