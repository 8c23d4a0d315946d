"""Warnings about data, tokenizer and losses: given when they apply, and only then."""

import re

import pytest

from profiles import resolve
from tasks.reporting.advice import data_warnings, rise_warning, tokens_of_pass, training_tokens

STEP_TOKENS = 8 * 256  # of tiny
ENOUGH = {"vocabulary_size": 4096}


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "expected"),
    [
        (ENOUGH, 300 * STEP_TOKENS // 4, []),  # four passes
        (ENOUGH, 3 * STEP_TOKENS, ["300 steps read the data about 100 times; .*at most 12 steps$"]),
        ({"vocabulary_size": 583}, 300 * STEP_TOKENS, ["the tokenizer has 583 tokens instead of 4,096: "]),
    ],
)
def test_repeated_data_and_small_tokenizers_are_warned_about(tokenizer, tokens, expected):
    warnings = data_warnings(resolve.load("tiny"), tokenizer, {"tokens": tokens})
    assert len(warnings) == len(expected)
    for warning, part in zip(warnings, expected, strict=True):
        assert re.search(part, warning)


def test_passes_over_pairs_count_padding_and_both_rows():
    settings = ("objective.kind=dpo", "train.steps=100", "train.global_batch_size=8")
    profile = resolve.load("tiny", settings)
    pairs = tokens_of_pass(profile, {"tokens": 999, "samples": 400})
    assert training_tokens(profile) / pairs == 100 * 8 / 400


@pytest.mark.parametrize(("last", "warned"), [(0.70, False), (0.71, False), (1.21, True)])
def test_a_validation_loss_well_above_the_lowest_is_warned_about(last, warned):
    warning = rise_warning({"step": 100, "validation_loss": 0.7}, {"step": 300, "validation_loss": last})
    assert bool(warning) is warned
    assert not warned or "rose by 73%, from 0.7000 at step 100 to 1.2100 at step 300" in warning
