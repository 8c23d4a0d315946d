"""Rounds on invented languages with few steps: what replay of any kind keeps, and rounds in a row."""

from benchmarks.rounds import learning, series


def test_replay_keeps_the_old_language_while_the_new_one_is_learned(tmp_path):
    made = series.Series(tmp_path / "series")
    promoted = made.train("first", made.begin(80), 80)
    new = made.add(1, 80)
    before = made.evaluate(promoted, new).losses("round-1")

    def changes(share: float, known=None, reptile=None):
        dataset = made.with_replay(new, share, 60, known)
        model = made.train("round", dataset, 60, promoted, reptile=reptile)
        return learning._changes(before, model.losses("round-1"))

    without = changes(0.0)
    assert without["old rise"] > 1
    others = [made.sampled(new, promoted, 60), made.stand_in(80)]  # generated text, and other text
    for known, reptile in [(None, None), *((each, None) for each in others), (None, series.Reptile(10, 0.5))]:
        found = changes(0.3, known, reptile)
        assert found["old rise"] < without["old rise"] / 2
        assert found["new fall"] > (0.5 if reptile else 0.8) * without["new fall"]


def test_rounds_in_a_row_are_compared_with_one_run_on_every_held_out_set(monkeypatch, tmp_path):
    for name, value in {
        "FIRST_STEPS": 40,
        "FIRST_DOCUMENTS": 80,
        "ROUND_STEPS": 20,
        "SHORT_DOCUMENTS": 80,
    }.items():
        monkeypatch.setattr(learning, name, value)
    monkeypatch.setattr(learning, "ROUNDS", 2)
    *rows, last = learning.ten_rounds(tmp_path / "rounds")
    sets = [row["row"] for row in rows if "once" in row]
    assert sets == ["first/files", "round-1/files", "round-2/files"]
    assert last["worst"] == max(row["difference"] for row in rows if "once" in row)
