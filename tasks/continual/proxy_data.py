"""Data of the proxies that find a series' replay share, pinned so that later rounds can reuse them.

The proxies' new data and history are those of the round for which they were trained first. Their losses hold for later rounds
too, as long as those have new data of the same sources, in similar proportions and amounts, and a similar amount of history.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Self

from modeling.data.replay import stream_shares
from tasks import keys
from tasks.continual.held_out import place, round_origin
from tasks.continual.replay import History, publish
from tasks.continual.series import Promoted
from tasks.steps.dataset import read_file
from tasks.store import ledger
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

FILE = "share.json"  # in the run folder of the proxy that stands for the promoted model
FACTOR = 2.0  # largest ratio of amounts of data that are similar
DIFFERENCE = 0.1  # largest difference of a source's share in new data that is similar
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProxyData:
    """What proxies are trained on and evaluated with.

    Attributes:
        base: identity of the promoted model.
        new: key of the dataset of new data, whose validation split has the held-out sets.
        history: key of the dataset of what the promoted model and its ancestors were trained on.
        origin: of the sets that the new data holds out.
        sources: share of each source in the new data.
        new_tokens, history_tokens: of both datasets.
    """

    base: str
    tokenizer: str
    new: str
    history: str
    origin: str
    sources: Mapping[str, float]
    new_tokens: int
    history_tokens: int

    @classmethod
    def of(
        cls, store: Store, promoted: Promoted, everything: Artifact, new: Artifact, history: Artifact
    ) -> Self:
        """The data of a round: `everything` is the dataset of all sources, of which `new` has the new shards."""
        return cls(
            promoted.identity,
            promoted.tokenizer,
            new.key,
            history.key,
            round_origin(promoted.next_round),
            _source_shares(read_file(store, everything), read_file(store, new)),
            new.summary["tokens"],
            history.summary["tokens"],
        )

    def why_not(self, store: Store, now: ProxyData) -> str | None:
        """Why proxies of this data say nothing about another round's; None if they do."""
        lineage = {entry.identity for entry in ledger.lineage(store, now.base)}
        if self.base not in lineage or self.tokenizer != now.tokenizer:
            return "the series has started anew"
        if self.sources.keys() != now.sources.keys():
            changed = sorted(self.sources.keys() ^ now.sources.keys())
            return f"the new data has other sources ({', '.join(changed)})"
        for name, share in now.sources.items():
            if abs(share - self.sources[name]) > DIFFERENCE:
                return f"source {name} is {share:.0%} of the new data, and was {self.sources[name]:.0%}"
        for what, before, after in (
            ("new data", self.new_tokens, now.new_tokens),
            ("history", self.history_tokens, now.history_tokens),
        ):
            if not 1 / FACTOR <= after / before <= FACTOR:
                return f"the {what} has {after:,} tokens, and had {before:,}"
        return None


def read_pinned(store: Store, run: str) -> ProxyData | None:
    """The data that a proxy was trained on; None if there is no such proxy."""
    found = store.run_folder(run).read_json(FILE)
    return ProxyData(**found) if found else None


def pin(store: Store, run: str, data: ProxyData) -> None:
    """Record the data of a proxy in its run folder."""
    store.run_folder(run).write(FILE, json.dumps(asdict(data), indent=1).encode())


def history_dataset(store: Store, new: Artifact, known: History) -> Artifact:
    """Dataset of the history only, whose streams are drawn in the proportions in which they are replayed."""
    contents = read_file(store, new)
    train = [shard for part in known.parts for shard in part.shards]
    weights = zip(stream_shares(known.streams), known.parts, strict=True)
    blend = [{"weight": weight, "shards": len(part.shards)} for weight, part in weights]
    selected = {**contents, "train": train, "blend": blend}
    summary = {**new.summary, "tokens": sum(shard["tokens"] for shard in train), "shards": len(train)}
    return publish(store, keys.new_data(selected), selected, train, summary, [])


def _source_shares(everything: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, float]:
    """Share of each source in new data: by its weight, or of the tokens."""
    parts = new.get("blend")
    if parts:
        weights = {part.get("name", str(n)): part["weight"] for n, part in enumerate(parts) if part["weight"]}
    else:
        chosen = set(map(place, new["train"]))
        entries, weights = iter(everything["train"]), {}
        for source in everything["sources"]:
            found = [entry for entry in islice(entries, source["shards"]) if place(entry) in chosen]
            if tokens := sum(entry["tokens"] for entry in found):
                weights[source["name"]] = tokens
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
