"""What a profile's data is made of: its shards, the tokenizer and the options, as one value that any machine can work from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks import keys
from tasks.sources.shard import Shard
from tasks.store.artifacts import Artifact

TOKENS = "tokens"  # the kind of a shard's artifact


@dataclass(frozen=True)
class DatasetPlan:
    """Everything that the tokens of every shard depend on.

    Attributes:
        tokenizer: its artifact.
        shards: of all sources, in order.
        drops: for each shard "", or the digest of the numbers of its documents that are dropped as duplicates.
        duplicates: key of the artifact that has those numbers.
        others: options, as in a profile's `data`.
    """

    tokenizer: Artifact
    shards: tuple[Shard, ...]
    validation_fraction: float
    append_eos: bool
    prepend_bos: bool
    minimum_length: int
    deduplicate: bool
    drops: tuple[str, ...] = ()
    duplicates: str | None = None

    @classmethod
    def of(cls, profile: Profile, tokenizer: Artifact, shards: list[Shard]) -> DatasetPlan:
        """Raises ProfileError where documents shall begin with BOS or end with EOS, and the tokenizer has no such token."""
        data, facts = profile.data, tokenizer.summary
        for key, name, wanted in (
            ("prepend_bos", "bos", data.prepend_bos),
            ("append_eos", "eos", data.append_eos),
        ):
            if wanted and facts[name] is None:
                reason = f"{facts['source']} names no {name.upper()} token"
                raise ProfileError(f"data.{key}", True, reason, [False])
        options = {
            field.name: getattr(data, field.name) for field in fields(cls) if hasattr(data, field.name)
        }
        return cls(tokenizer, tuple(shards), **options)

    def key(self, k: int) -> str:
        """Cache key of the tokens of shard k."""
        shard = self.shards[k]
        drops = self.drops[k] if self.drops else ""
        if shard.format == "megatron":
            size = self.tokenizer.summary["vocabulary_size"]
            return keys.tokens(None, shard.digest, self._held_out(shard), vocabulary_size=size)
        return keys.tokens(
            self.tokenizer.key,
            shard.digest,
            self._held_out(shard),
            append_eos=self.append_eos,
            prepend_bos=self.prepend_bos,
            minimum_length=self.minimum_length,
            drops=drops,
        )

    def _held_out(self, shard: Shard) -> float | str:
        return self.validation_fraction if shard.use == "split" else shard.use

    def to_json(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        shards = [shard.to_json() for shard in self.shards]
        return {**own, "tokenizer": self.tokenizer.to_json(), "shards": shards}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DatasetPlan:
        shards = tuple(map(Shard.from_json, value["shards"]))
        tokenizer = Artifact.from_json(value["tokenizer"])
        return cls(**{**value, "tokenizer": tokenizer, "shards": shards, "drops": tuple(value["drops"])})
