"""Stand-in sources: data in place of the unknown data of the initial weights, replayed and held out."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from profiles.errors import ProfileError
from profiles.files import run_files
from profiles.rules.continual import stand_in_data
from profiles.schema import Profile
from tasks import inputs
from tasks.continual import series
from tasks.continual.replay import History, of_dataset, rows_of
from tasks.continual.series import Promoted
from tasks.step import Context
from tasks.steps.dataset import DatasetStep, read_file
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

RUN = "continual.stand_in"  # in place of the name of a run that was trained on the data
log = logging.getLogger(__name__)


def make(context: Context, tokenizer: Artifact) -> Artifact | None:
    """Dataset of the stand-in sources, pinned for the series when it is made first; None without any."""
    profile, store = context.profile, context.store
    if not profile.continual.stand_in:
        return None
    with_stand_in = profile.model_copy(update={"data": stand_in_data(profile)})
    folder = store.run_folder(profile.name)
    pins = folder.read(run_files.STAND_IN)
    known = pins and inputs.Lockfile.from_bytes(pins, folder.location(run_files.STAND_IN))
    try:
        pinned = inputs.resolve(with_stand_in, store, context.token, known or None, data_only=True)
        made = DatasetStep(tokenizer).run(replace(context, profile=with_stand_in, resolved=pinned))
    except ProfileError as error:
        if error.key.startswith("data.sources"):
            key = error.key.replace("data.sources", "continual.stand_in", 1)
            raise ProfileError(key, error.value, error.reason, error.choices) from error
        raise
    folder.write(run_files.STAND_IN, pinned.lockfile.to_bytes())
    return made


def history(store: Store, made: Artifact, sequence_length: int) -> History:
    """The streams of the stand-in sources, none of them replayed yet."""
    contents: dict[str, Any] = read_file(store, made)
    return of_dataset(made.key, RUN, contents, sequence_length, rows_of(store, made, contents))


def unknown_weights(store: Store, profile: Profile, promoted: Promoted) -> str | None:
    """Initial weights or run of which nothing stands for what they were trained on; None without any.

    What a series of fine-tuning must not forget is its records, all of which are in the ledger.
    """
    if profile.objective.traits.reads_records:
        return None
    if profile.continual.stand_in or profile.continual.replay_from == "generated":
        return None
    return series.ancestors_of(store, promoted).unknown


def warn_if_unknown(context: Context, promoted: Promoted) -> None:
    """Warn of earlier data that is neither replayed nor stood for."""
    initial = unknown_weights(context.store, context.profile, promoted)
    if initial is not None:
        log.warning(
            "continual.stand_in: what %s was trained on, which the series started from, cannot be replayed, so forgetting it is "
            "neither prevented nor measured; name sources that stand for it, or set continual.replay_from=generated",
            initial,
        )
    if context.profile.objective.traits.reads_records:
        for name in series.ancestors_of(context.store, promoted).left_out:
            log.warning(
                "continual.replay: records of %s are not replayed: its objective.kind, objective.packing or "
                "train.sequence_length is not that of the first run of %s, or a profile.yaml is gone",
                name,
                context.profile.name,
            )
