"""Building blocks of pages: what may be broken on a narrow page."""

from tasks.reporting import html


def test_on_a_phone_words_are_broken_but_numbers_are_not():
    page = html.table(
        ("cell",), [("5.0239",), ("4.3294 – 5.0239",), ("tiny-ladder-h32-l3-t0.5",), ("2 words in a cell",)]
    )
    assert "<td class=short>5.0239</td>" in page
    assert "<td class=interval>4.3294 – 5.0239</td>" in page
    assert "<td>2 words in a cell</td>" in page
    assert "<td class=long>tiny-ladder-h32-l3-t0.5</td>" in page
    assert "<th>validation_loss/<wbr>a&amp;b</th>" in html.properties({"validation_loss/a&b": "1.5"})
    assert "<div class=row><b>nightly-of-a-team-round-3</b>" in html.key_figures(
        {"promoted": "nightly-of-a-team-round-3"}
    )
