"""YAML of profiles: aliases, merges, and limits that hold before anything is made of a text."""

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import yaml_text


def test_anchor_that_merges_another_may_be_merged_itself():
    text = "a: &a {x: 1, y: 2}\nb: {inner: &b {<<: *a, x: 3}}\nc: {<<: *b}\n"
    assert yaml_text.parse(text) == {
        "a": {"x": 1, "y": 2},
        "b": {"inner": {"x": 3, "y": 2}},
        "c": {"x": 3, "y": 2},
    }


def _bomb(levels: int) -> str:
    """Nine aliases of nine aliases …, below an unknown key."""
    lines = [
        f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join([f'*{chr(97 + level)}'] * 9)}]"
        for level in range(levels)
    ]
    return "\n".join(["extends: tiny", "a: &a [x, x, x, x, x, x, x, x, x]", *lines])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (_bomb(8), "more than 100,000 values"),
        ("a: &a [*a]", r"\*a contains itself"),
        ("model: " + "[" * 3000, "more than 50 deep"),
        ("- " * 3000 + "1", "more than 50 deep"),
        ("#" * 5_000_000, "more than 1,000,000 bytes"),
    ],
)
def test_hostile_yaml_is_rejected_before_anything_is_made_of_it(text, reason, tmp_path):
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=reason) as failure:
        resolve.load(str(path))
    assert len(str(failure.value)) < 500
    with pytest.raises(ProfileError, match=reason):
        resolve.load("tiny", [f"data.sources={text}"])


def test_aliases_and_anchors_of_ordinary_size_are_read():
    assert yaml_text.parse(_bomb(2))["c"][8][8] == ["x"] * 9
