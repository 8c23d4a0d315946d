"""The text that comes with Trainshed."""

import gzip

import pytest

from tasks.sources import python_docs
from tasks.sources.shard import SourceError


def test_python_docs_are_distinct_english_documents():
    documents = list(python_docs.documents())
    paragraphs = [line for document in documents for line in document.split("\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert (len(documents), sum(map(len, documents))) == (498, 1_243_820)
    assert all(document.isascii() for document in documents)
    assert "\n".join(documents).count(" the ") > 10_000
    records = list(python_docs.records())
    assert len(records) > 4000
    assert records[-1]["prompt"] == "What does zoneinfo._zoneinfo.ZoneInfo._ts_to_local do?\n"
    assert all(record["completion"].startswith(record["rejected"]) for record in records)


def test_another_text_is_named_and_rejected(tmp_path, monkeypatch):
    file = tmp_path / "python-docs.jsonl.gz"
    monkeypatch.setattr(python_docs, "FILE", file)
    for write in (
        lambda: None,
        lambda: file.write_bytes(gzip.compress(b'["module", [["", "Other text."]]]\n')),
    ):
        write()
        with pytest.raises(SourceError, match=f"^{file}: .*; install Trainshed again$"):
            list(python_docs.documents())
