"""Promotion of an earlier model of a series, in place of the one that was promoted last."""

from __future__ import annotations

from profiles.errors import ProfileError
from tasks.continual import series
from tasks.continual.rounds import find_earlier
from tasks.continual.series import Promoted
from tasks.inputs import EXPORT
from tasks.store import activities
from tasks.store.store import Store


def promote_earlier(store: Store, name: str, run: str) -> tuple[Promoted, Promoted]:
    """Make a run that was promoted earlier the promoted model again; returns the models before and after.

    The next round starts from its weights, trains on what is in no ledger entry of it or its ancestors, and is evaluated on the
    sets that they held out. A round that is running is waited for.

    Raises ProfileError if the run was never promoted in the series, or its model is no longer there.
    """
    find_earlier(store, name, run)  # before any wait
    with activities.begin(store, "continual", name):
        current = series.promoted_model(store, name)
        earlier = find_earlier(store, name, run)
        if current is None:  # find_earlier has rejected this
            raise ProfileError("name", name, "is no series")
        if current.run == earlier.run:
            return current, current
        series.latest_step(store, earlier)  # a round starts from its checkpoint
        if not store.run_folder(earlier.run).files(EXPORT):
            reason = (
                f"has no exported model in {store.run_folder(earlier.run).location(EXPORT)}; export it first"
            )
            raise ProfileError("run", earlier.run, reason)
        series.set_promoted(store, name, earlier)
        return current, earlier
