"""The built-in corpus of Python's documentation."""

from itertools import islice

from tasks.sources import python_docs


def test_python_docs_are_distinct_english_documents_in_a_fixed_order():
    documents = list(python_docs.documents())
    assert documents[:150] == list(islice(python_docs.documents(), 150))
    assert len(set(documents)) == len(documents) > 500
    assert sum(map(len, documents)) > 1.8e6
    assert "\n".join(documents).count(" the ") > 10_000
    assert python_docs.digest() == python_docs.digest()
