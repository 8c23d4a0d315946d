"""Document masks: a packed sample gives each document the same hidden states as the document alone."""

import pytest
import torch

from modeling.models.families.gpt import GPT
from modeling.models.families.hybrid import Hybrid
from modeling.models.families.llama import Llama
from parallel import Mesh, initialize
from tests.modeling.data.datasets import write_dataset
from tests.parity.harness import MODELS, Case


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", Llama), ("gemma2", Llama), ("gpt", GPT), ("qwen3_5", Hybrid)],
)
def test_packed_documents_match_documents_computed_alone(name, kind):
    model = Case(name).profile().model.model_copy(update=MODELS[name])
    network = kind(model, Mesh(1, 1, 1, 1, 1), dtype=torch.float64)
    initialize(network.named_parameters(), Mesh(1, 1, 1, 1, 1).tensor, 7)
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    cuts = [[0, 5, 6, 19], [0, 11]]
    starts = torch.stack([torch.tensor([max(c for c in row if c <= i) for i in range(24)]) for row in cuts])
    packed = network(tokens, torch.arange(24), documents=starts).view(2, 24, -1)
    plain = network(tokens, torch.arange(24)).view(2, 24, -1)
    for row, bounds in enumerate(cuts):
        for start, stop in zip(bounds, [*bounds[1:], 24], strict=True):
            alone = network(tokens[row : row + 1, start:stop], torch.arange(stop - start))
            torch.testing.assert_close(packed[row, start:stop], alone, rtol=1e-12, atol=1e-12)
            assert start == 0 or not torch.allclose(plain[row, start:stop], alone)


def test_document_starts_come_from_the_index(tmp_path):
    from modeling.data.corpus import Corpus, Samples

    corpus = Corpus.open(write_dataset(tmp_path, range(100), [50], document=7), "train")
    begins = [*range(0, 50, 7), *range(50, 100, 7)]
    for first, count in (0, 99), (3, 11), (48, 5), (60, 40):
        expected = [max([begin for begin in begins if begin <= i] + [0]) for i in range(first, first + count)]
        assert corpus.document_starts(first, count).tolist() == [max(0, begin - first) for begin in expected]
    samples = Samples(corpus, 16, seed=1)
    for row, starts in zip(samples.batch(0, 6), samples.document_starts(0, 6), strict=True):
        assert [int(row[start]) in begins or start == 0 for start in starts] == [True] * 16


def test_prompt_begins_with_a_document_unless_none_is_near(tmp_path):
    from modeling.data.corpus import Corpus, Samples

    for length, expected in ((7, [7, 21, 35, 49]), (36, [36, 36, 36, 36]), (100, [0, 16, 32, 48])):
        corpus = Corpus.open(
            write_dataset(tmp_path / str(length), range(100), [100], document=length), "train"
        )
        samples = Samples(corpus, 16, seed=None)
        assert [int(samples.prompt(number)[0]) for number in range(4)] == expected
