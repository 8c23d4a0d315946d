"""Immutable artifacts of one JSON file: a ladder's forecast, a mixture's proposal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from profiles.files.state_files import retried
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store


def get_or_create(
    store: Store,
    id: ArtifactId,
    target: Mapping[str, Any],
    compute: Callable[[], dict[str, Any]],
    summary: Iterable[str],
) -> Artifact:
    """Artifact of a document (time, target, values); computes and publishes it unless the store has it.

    Args:
        target: facts about the target run; `settings` is copied to the artifact's summary.
        summary: names of the document's values to copy to the artifact's summary.
    """
    with store.artifacts.lock(id):
        if found := store.artifacts.find(id):
            return found
        computed = compute()
        document = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "target": target, **computed}
        shown = {name: document[name] for name in ("written", *summary)} | {"settings": target["settings"]}
        with store.artifacts.publish(id, shown) as folder:
            (folder / f"{id.kind}.json").write_text(json.dumps(document, indent=1))
    return store.artifacts.expect(id)


def read(store: Store, artifact: Artifact) -> dict[str, Any]:
    path = store.artifacts.path(artifact) / f"{artifact.kind}.json"
    contents: dict[str, Any] = json.loads(retried(path.read_text))
    return contents
