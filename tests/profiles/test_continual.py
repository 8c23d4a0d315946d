"""Rounds of continual training: which profiles can be trained in rounds, and what a round keeps."""

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from profiles.rules.continual import check_round, check_same_training
from tests.profiles.pair import PAIR

RECORDS = ("tokenizer.source=org/name",)


def test_rounds_train_what_the_promoted_model_was_trained_on():
    tuned = [*RECORDS, "objective.kind=sft", "init.from=org/model"]
    promoted = resolve.load(PAIR, [*tuned, "lora.rank=8"])
    for override, key, choice in (
        ("lora.rank=4", "lora.rank", 8),
        ("lora.rank=null", "lora.rank", 8),
        ("lora.alpha=2", "lora.alpha", 16.0),
        ("train.sequence_length=64", "train.sequence_length", promoted.train.sequence_length),
        ("objective.packing=false", "objective.packing", True),
        ("objective.kind=orpo", "objective.kind", "sft"),
    ):
        with pytest.raises(ProfileError, match="the promoted model, which a round trains further") as caught:
            check_same_training(resolve.load(PAIR, [*tuned, "lora.rank=8", override]), promoted)
        assert (caught.value.key, caught.value.choices) == (key, (choice,))
    check_same_training(promoted, promoted)
    check_round(promoted)
    for kind in ("dpo", "orpo"):
        with pytest.raises(
            ProfileError, match=r"objective\.kind = .*not supported in continual pretraining: its loss"
        ):
            check_round(resolve.load(PAIR, [*tuned, f"objective.kind={kind}"]))
