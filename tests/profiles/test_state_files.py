"""State files that lost their contents are named, or count as absent; an unreadable one is neither."""

import pytest

from profiles import state_files


@pytest.mark.parametrize("text", ["", "\0\0\0", '{"identifier": "7', "[1]"])
def test_corrupted_file_counts_as_absent_with_a_warning(tmp_path, caplog, text):
    path = tmp_path / "train.job.json"
    assert state_files.read_json(path) is None
    assert not caplog.records
    path.write_text(text)
    assert state_files.read_json(path) is None
    assert f"{path}: corrupted" in caplog.text
    state_files.write(path, '{"identifier": "8"}')
    assert state_files.read_json(path) == {"identifier": "8"}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_line_is_appended_after_one_that_was_cut_off(tmp_path):
    path = tmp_path / "events.jsonl"
    for line in ("1", "2"):
        state_files.append_line(path, line)
    path.write_text(path.read_text() + '{"half')
    state_files.append_line(path, "3")
    assert path.read_text() == '1\n2\n{"half\n3\n'


def test_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        state_files.read_json(tmp_path)
