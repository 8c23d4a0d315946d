"""Warnings about data, tokenizer and losses: given when they apply, and only then."""

import re

import pytest

from profiles import resolve
from tasks.reporting.advice import data_warnings, rise_warning, tokens_of_pass, training_tokens
from tests.profiles.pair import PAIR

STEP_TOKENS = 8 * 256  # of PAIR
ENOUGH = {"vocabulary_size": 4096}


@pytest.mark.parametrize(
    ("tokenizer", "dataset", "expected"),
    [
        (ENOUGH, {"tokens": 300 * STEP_TOKENS // 4}, []),  # four passes
        (
            ENOUGH,
            {"tokens": 3 * STEP_TOKENS},
            ["300 steps read the data about 100 times; .*at most 12 steps$"],
        ),
        (
            ENOUGH,
            {
                "tokens": 300 * STEP_TOKENS,
                "missing": 1003,
                "incomplete": 3,
                "incomplete_files": {"b/x.parquet": 1000, "a.jsonl": 2},
            },
            [r"^left out 1,003 records without text: b/x.parquet \(1,000\), a.jsonl \(2\), 1 more file$"],
        ),
        (
            {"vocabulary_size": 583},
            {"tokens": 300 * STEP_TOKENS},
            ["the tokenizer has 583 tokens instead of 4,096: "],
        ),
    ],
)
def test_missing_repeated_data_and_small_tokenizers_are_warned_about(tokenizer, dataset, expected):
    warnings = data_warnings(resolve.load(PAIR), tokenizer, dataset)
    assert len(warnings) == len(expected)
    for warning, part in zip(warnings, expected, strict=True):
        assert re.search(part, warning)


def test_passes_over_pairs_count_padding_and_both_rows():
    settings = ("objective.kind=dpo", "train.steps=100", "train.global_batch_size=8")
    profile = resolve.load(PAIR, settings)
    pairs = tokens_of_pass(profile, {"tokens": 999, "samples": 400})
    assert training_tokens(profile) / pairs == 100 * 8 / 400


@pytest.mark.parametrize(("last", "warned"), [(0.70, False), (0.71, False), (1.21, True)])
def test_a_validation_loss_well_above_the_lowest_is_warned_about(last, warned):
    warning = rise_warning({"step": 100, "validation_loss": 0.7}, {"step": 300, "validation_loss": last})
    assert bool(warning) is warned
    assert not warned or "rose by 73%, from 0.7000 at step 100 to 1.2100 at step 300" in warning
