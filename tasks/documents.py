"""Documents in the store: what a ladder or a mixture computes for its target, one JSON file in an immutable artifact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from profiles.state_files import retried
from tasks.store.artifacts import Artifact
from tasks.store.store import Store


def register(
    store: Store,
    kind: str,
    key: str,
    target: Mapping[str, Any],
    compute: Callable[[], dict[str, Any]],
    summary: Iterable[str],
) -> Artifact:
    """The artifact of a document, which is computed unless the store has it; the document begins with its time and target.

    Args:
        target: with `settings`, which the artifact's summary has too.
        summary: names in the document that the artifact's summary has.
    """
    with store.artifacts.lock(kind, key):
        if found := store.artifacts.find(kind, key):
            return found
        computed = compute()
        document = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "target": target, **computed}
        shown = {name: document[name] for name in ("written", *summary)} | {"settings": target["settings"]}
        with store.artifacts.publish(kind, key, shown) as folder:
            (folder / _file(kind)).write_text(json.dumps(document, indent=1))
    return store.artifacts.expect(kind, key)


def read(store: Store, artifact: Artifact) -> dict[str, Any]:
    """The contents of a document."""
    return json.loads(retried((store.artifacts.path(artifact) / _file(artifact.kind)).read_text))


def _file(kind: str) -> str:
    return f"{kind}.json"
