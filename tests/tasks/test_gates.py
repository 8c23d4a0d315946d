"""Gates of continual pretraining: what they may be on, and when a round is promoted."""

import pytest

from profiles.errors import ProfileError
from profiles.schema import Gate
from tasks.continual.gates import check_gates, judge

DEFAULT = [Gate(on="old", rise_at_most=0.01), Gate(on="new", fall_at_least=0.0)]
BEFORE = {"first/wiki": 1.0, "first/code": 2.0, "round-1/wiki": 1.5, "round-2/wiki": 3.0}


def sets(losses):
    """Losses by set, on 100 tokens each, but 300 of the first."""
    tokens = {"first/wiki": 300}
    return {name: {"loss": loss, "tokens": tokens.get(name, 100)} for name, loss in losses.items()}


def judged(after, gates=DEFAULT, scores=({}, {})):
    return judge(gates, sets(BEFORE), sets(BEFORE | after), "round-2", scores)


def test_table_has_the_gates_then_each_set_before_and_after():
    verdict = judged({"first/wiki": 1.01, "round-2/wiki": 2.0})
    assert verdict.promotes
    rows = [(row.set, round(row.before, 4), round(row.after, 4), row.met) for row in verdict.rows]
    assert rows == [
        ("old", 1.3, 1.306, True),  # the mean per token
        ("new", 3.0, 2.0, True),
        ("first", 1.25, 1.2575, None),
        ("round-1", 1.5, 1.5, None),
        ("source:wiki", 1.5, 1.306, None),
        ("source:code", 2.0, 2.0, None),
    ]
    assert verdict.text.splitlines()[1] == "old          1.3000  1.3060  rises ≤ 0.01  yes"


@pytest.mark.parametrize(
    ("after", "gates", "reason"),
    [
        ({}, DEFAULT, "new did not change at 3.0000 (required: falls)"),
        ({"round-2/wiki": 3.5}, DEFAULT, "new rose from 3.0000 to 3.5000 (required: falls)"),
        (
            {"round-2/wiki": 1.0, "first/wiki": 1.5},
            DEFAULT,
            "old rose from 1.3000 to 1.6000 (required: rises ≤ 0.01)",
        ),
        ({"round-2/wiki": float("nan")}, DEFAULT, "new was not measured: it is 3.0 before and nan after"),
        (
            {"round-2/wiki": 2.9},
            [Gate(on="new", fall_at_least=0.5)],
            "new fell from 3.0000 to 2.9000 (required: falls ≥ 0.5)",
        ),
        (
            {"round-1/wiki": 1.7},
            [Gate(on="round-1", rise_at_most=0.1)],
            "round-1 rose from 1.5000 to 1.7000 (required: rises ≤ 0.1)",
        ),
        (
            {"first/wiki": 2.0},
            [Gate(on="first", rise_at_most=0.1)],
            "first rose from 1.2500 to 2.0000 (required: rises ≤ 0.1)",
        ),
        (
            {"first/code": 2.2},
            [Gate(on="source:code", rise_at_most=0.1)],
            "source:code rose from 2.0000 to 2.2000 (required: rises ≤ 0.1)",
        ),
    ],
)
def test_round_is_not_promoted_for_the_gate_that_it_misses(after, gates, reason):
    verdict = judged(after, gates)
    assert not verdict.promotes
    assert verdict.reason == reason


def test_no_round_is_promoted_on_a_value_that_is_not_a_number_though_no_gate_is_on_it():
    assert not judged({"first/code": float("nan")}, []).promotes
    assert judged({}, []).promotes


def test_score_of_a_task_has_a_smallest_value():
    gates = [Gate(on="task:endings", at_least=0.5)]
    assert judged({}, gates, ({"endings": 0.4}, {"endings": 0.5})).promotes
    missed = judged({}, gates, ({"endings": 0.6}, {"endings": 0.4}))
    assert missed.reason == "task:endings fell from 0.6000 to 0.4000 (required: at least 0.5)"


@pytest.mark.parametrize(
    ("on", "reason", "choices"),
    [
        ("round-12", "names no held-out text of the series", ["round-2"]),
        ("source:wikis", "names no held-out text of the series", ["source:wiki"]),
    ],
)
def test_gate_on_something_unknown_is_rejected_with_the_nearest_names(on, reason, choices):
    with pytest.raises(ProfileError, match=reason) as error:
        check_gates([*DEFAULT, Gate(on=on, rise_at_most=0.1)], BEFORE, "round-2")
    assert error.value.key == "continual.gates.2.on"
    assert [*error.value.choices[:1]] == choices


def test_default_gates_are_rejected_where_nothing_old_or_new_is_held_out():
    with pytest.raises(ProfileError, match=r"continual\.gates\.0\.on = old: .*continual\.stand_in"):
        check_gates(DEFAULT, ["round-2/wiki"], "round-2")
    with pytest.raises(ProfileError, match=r"continual\.gates\.1\.on = new: .*data\.validation_fraction"):
        check_gates(DEFAULT, ["first/wiki"], "round-2")
