"""Checkpoint: pretrained weights from wherever they are, as a Trainshed checkpoint that training starts from.

A run from scratch has none, and skips this step. The weights are written split as the profile spreads its model, so each rank
reads its own file; any other topology can start from them too.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from modeling.conversion import formats
from modeling.conversion.convert import Options, convert
from modeling.conversion.journal import RECORD
from modeling.models.build import partition_layers
from profiles.errors import ProfileError
from profiles.model import Model, to_config_json
from profiles.schema import Profile
from tasks import keys
from tasks.sources import weights
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

KIND = "checkpoint"
SAME = (
    "hidden_act",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
)  # what weights were trained with, but do not show
log = logging.getLogger(__name__)


def needed(profile: Profile) -> bool:
    """Whether the profile starts from pretrained weights."""
    return profile.init.from_ is not None


def key(profile: Profile, store: Store, token: str | None = None) -> str:
    """Cache key of the step: of the weights' contents, or of the commit they come from, and of the model.

    Raises:
        ProfileError: there is nothing at init.from.
    """
    init = profile.init
    identity = weights.identity(
        init.from_, init.revision, token, "init.from", store.scratch_folder("digests")
    )
    return keys.checkpoint(profile, identity)


def run(profile: Profile, store: Store, key: str, token: str | None = None) -> Artifact:
    """Publish the weights at init.from as a Trainshed checkpoint, unless they are there.

    What an interrupted attempt has written is gone on with. The artifact's summary: source, tensors and bytes.

    Raises:
        ProfileError: the weights are refused, or are not of the profile's model.
    """
    init, parallel = profile.init, profile.parallel
    with store.artifacts.lock(KIND, key):
        found = store.artifacts.find(KIND, key)
        if found:
            return found
        work = store.scratch_folder(f"{KIND}-{key}")
        config, made = work / "config.json", work / "checkpoint"
        config.write_text(json.dumps(to_config_json(profile.model)))
        cuts = tuple(layers.start for layers in partition_layers(profile)[1:])
        options = Options("trainshed", config, parallel.tensor, cuts=cuts or None)
        with weights.fetched(init.from_, init.revision, work / "source", token, "init.from") as source:
            try:
                _compare(formats.locate(source), profile.model)
                record = convert(source, made, options, name=init.from_, replace=True)
            except ValueError as error:  # ProfileErrors too
                raise ProfileError("init.from", init.from_, str(error)) from error
        summary = {"source": init.from_, "tensors": record["tensors"], "bytes": record["bytes"]}
        with store.artifacts.publish(KIND, key, summary) as staging:
            for path in made.iterdir():
                if path.name != RECORD:
                    path.rename(staging / path.name)
        store.remove_scratch_folder(f"{KIND}-{key}")
    return store.artifacts.expect(KIND, key)


def _compare(source: Path, model: Model) -> None:
    """Say where a Hugging Face model's own configuration differs in what its weights do not show."""
    path = source / "config.json"
    if not path.is_file():
        return
    theirs = formats.read_config(path)
    for name in SAME:
        own, other = getattr(model, name), getattr(theirs, name)
        if own != other:
            log.warning("model.%s is %s here, %s in the weights' config.json", name, own, other)
