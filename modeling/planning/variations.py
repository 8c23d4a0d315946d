"""Small changes of a topology: neighbouring degrees, shardings, microbatches, stages per rank.

The search changes its fastest topologies by one of them as long as that makes the step shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modeling.models.flops import layer_multiply_adds
from parallel.constraints import valid_expert_degrees
from parallel.pipeline.stages import cut_layers
from profiles.recompute import AUTO
from profiles.schema import Profile

# Minimum tokens of a sequence per context rank, fewer than the planner proposes (planner.py): each rank has two parts of it,
# whose products must keep a device busy.
LEAST_CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class Variation:
    """The keys of a topology that the search changes."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    sharding: str
    shard_degree: int | None
    stages: int  # per pipeline rank
    microbatch: int  # samples

    @classmethod
    def of(cls, profile: Profile, overrides: Mapping[str, Any]) -> Variation:
        """The variation that a topology's overrides describe."""
        parallel = profile.parallel

        def chosen(name: str) -> Any:
            return overrides.get(f"parallel.{name}", getattr(parallel, name))

        pipeline, cuts = chosen("pipeline"), overrides.get("parallel.pipeline_cuts")
        stages = 2 if chosen("schedule") == "interleaved" and pipeline > 1 else 1
        return cls(
            chosen("tensor"),
            pipeline,
            chosen("context"),
            chosen("expert"),
            chosen("data_sharding"),
            chosen("shard_degree"),
            (len(cuts) + 1) // pipeline if cuts else stages,
            overrides.get("train.micro_batch_size", profile.train.micro_batch_size),
        )

    def keys(self, profile: Profile) -> dict[str, Any]:
        """The profile keys to set; schedule, cuts and microbatch only if they differ from the profile's."""
        parallel, train = profile.parallel, profile.train
        found: dict[str, Any] = {
            f"parallel.{name}": getattr(self, name) for name in ("tensor", "pipeline", "context")
        }
        if profile.model.num_experts is not None:
            found["parallel.expert"] = self.expert
        found |= {"parallel.data_sharding": self.sharding, "parallel.shard_degree": self.shard_degree}
        found["parallel.keep_gathered"] = AUTO if self.sharding == "fsdp" else False
        default = 2 if parallel.schedule == "interleaved" and self.pipeline > 1 else 1
        if self.stages != default:
            found["parallel.schedule"] = "interleaved" if self.stages > 1 else "1f1b"
        if self.stages > 2:
            ranges = cut_layers(layer_multiply_adds(profile), self.stages * self.pipeline)
            found["parallel.pipeline_cuts"] = [stage.start for stage in ranges[1:]]
        if self.microbatch != train.micro_batch_size:
            found["train.micro_batch_size"] = self.microbatch
        return found

    def neighbours(self, profile: Profile) -> Iterator[Variation]:
        """Variations with one change, and some with two that belong together."""
        changes: list[dict[str, Any]] = [
            {name: value} for name, values in self._nearby(profile).items() for value in values
        ]
        shards = [
            None,
            self.shard_degree and self.shard_degree * 2,
            self.shard_degree and self.shard_degree // 2,
        ]
        changes += [{"sharding": "fsdp", "shard_degree": degree} for degree in shards]
        changes.append({"sharding": "fsdp", "shard_degree": profile.cluster.devices_per_node // self.tensor})
        changes.append({"sharding": "zero1", "shard_degree": None})
        if self.tensor > 1:  # what a smaller tensor group leaves to hold, other axes divide
            for name in ("context", "pipeline"):
                changes.append({"tensor": self.tensor // 2, name: 2 * getattr(self, name)})
        if self.pipeline > 1:
            changes.append({"pipeline": self.pipeline // 2, "stages": 2 * self.stages})
        seen = {self}
        for change in changes:
            other = replace(self, **change)
            if other.pipeline == 1:
                other = replace(other, stages=1)
            if other not in seen and other.is_possible(profile):
                seen.add(other)
                yield other

    def _nearby(self, profile: Profile) -> dict[str, set[int]]:
        def doubled(value: int) -> set[int]:
            return {2 * value, value // 2} - {0}

        nearby = {
            name: doubled(getattr(self, name)) for name in ("tensor", "pipeline", "context", "microbatch")
        }
        nearby["stages"] = {*doubled(self.stages), self.stages + 1, self.stages - 1} - {0}
        if profile.model.num_experts is not None:
            nearby["expert"] = doubled(self.expert)
        return nearby

    def is_possible(self, profile: Profile) -> bool:
        """Whether degrees divide what they must; the profile's rules reject the rest."""
        model, train = profile.model, profile.train
        ranks, rest = divmod(profile.world_size, self.tensor * self.pipeline * self.context)
        if rest or self.tensor > profile.cluster.devices_per_node:
            return False
        shards = ranks * self.context
        return (
            self.tensor in model.tensor_degrees
            and self.stages * self.pipeline <= model.num_hidden_layers
            and (self.context == 1 or train.sequence_length // self.context >= LEAST_CONTEXT_TOKENS)
            and train.global_batch_size % (ranks * self.microbatch) == 0
            and (
                self.shard_degree is None
                or (1 < self.shard_degree < shards and shards % self.shard_degree == 0)
            )
            and (model.num_experts is None or self.expert in valid_expert_degrees(model.num_experts, shards))
        )
