"""DatasetPlan: a profile's shards, tokenizer and data options, as one JSON value for any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic.dataclasses import dataclass

from profiles.errors import ProfileError
from profiles.schema import Objective, Profile
from profiles.sections.roles import keys_of
from tasks import keys
from tasks.sources.shard import Shard
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tasks.tokenization import chat_templates
from tasks.tokenization.tokenizer_files import has_plain_added_tokens

RECORD_OPTIONS = set(keys_of(Objective, "tokens"))
TOKENS = "tokens"  # artifact kind of a tokenized shard


def require_special_tokens(profile: Profile, summary: Mapping[str, Any]) -> None:
    """Raise ProfileError if the tokenizer of this summary lacks the BOS or EOS that the data needs."""
    for key, name in (("prepend_bos", "bos"), ("append_eos", "eos")):
        if getattr(profile.data, key) and summary[name] is None:
            reason = f"the tokenizer {summary['source']} has no {name.upper()} token"
            raise ProfileError(f"data.{key}", True, reason, [False])


def record_options(profile: Profile) -> dict[str, Any] | None:
    """The values of examples.RecordOptions; None for pretraining, which reads texts."""
    if not profile.objective.traits.reads_records:
        return None
    objective = profile.objective.model_dump(include=RECORD_OPTIONS)
    template = objective["template"] and chat_templates.read_template(objective["template"])
    return {**objective, "template": template, "sequence_length": profile.train.sequence_length}


@dataclass(frozen=True)
class DatasetPlan:
    """Everything that the shards' tokens depend on; the options are those of a profile's `data` section.

    `asdict` makes it JSON, and `DatasetPlan(**value)` reads that.
    """

    tokenizer: Artifact  # the tokenizer's artifact
    shards: tuple[Shard, ...]  # of all sources, in order
    validation_fraction: float
    append_eos: bool
    prepend_bos: bool
    minimum_length: int
    deduplicate: bool
    # For each shard, the digest of the indices of the documents to drop from it as duplicates; "" if there are none.
    drops: tuple[str, ...] = ()
    duplicates: str | None = None  # key of the artifact that lists those indices
    records: Mapping[str, Any] | None = None  # examples.RecordOptions as a mapping; None: texts, not records
    engine: int | None = None  # keys.ENGINE if tokens may depend on it

    @classmethod
    def of(cls, profile: Profile, tokenizer: Artifact, shards: Sequence[Shard], store: Store) -> DatasetPlan:
        """Plan of a profile's data, not deduplicated. Raises ProfileError if the tokenizer lacks BOS or EOS."""
        data = profile.data
        require_special_tokens(profile, tokenizer.summary)
        records = record_options(profile)
        engine = None
        if not records and has_plain_added_tokens(store.artifacts.path(tokenizer)):
            engine = keys.ENGINE
        names = [field.name for field in fields(cls) if hasattr(data, field.name)]
        options = {name: getattr(data, name) for name in names}
        return cls(tokenizer, tuple(shards), records=records, engine=engine, **options)

    def key(self, k: int) -> str:
        """Cache key of the tokens of shard k."""
        shard = self.shards[k]
        held_out = self.validation_fraction if shard.use == "split" else shard.use
        if shard.format == "megatron":
            size = self.tokenizer.summary["vocabulary_size"]
            return keys.tokens(None, shard.digest, held_out, vocabulary_size=size)
        options = {name: getattr(self, name) for name in ("append_eos", "prepend_bos", "minimum_length")}
        if self.records:
            options["records"] = self.records
        if self.engine is not None and shard.format != "tokens":
            options["engine"] = self.engine
        drops = self.drops[k] if self.drops else ""
        return keys.tokens(self.tokenizer.key, shard.digest, held_out, drops=drops, **options)
