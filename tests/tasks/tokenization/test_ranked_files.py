"""Tokenizers from files of byte sequences by rank, compared with byte-pair encoding as it is defined."""

import base64
import json
from itertools import pairwise

import pytest
import regex
from transformers.convert_slow_tokenizer import bytes_to_unicode

from profiles.errors import ProfileError
from tasks.tokenization import ranked_files, tokenizer_files
from tests.tasks.tokenization.tokenizers import DOCUMENTS, EOS, gpt2, trained

TEXTS = [*DOCUMENTS[:3], "camelCase DON'T we'Re 12345\n\n  x/\n", "naïve 日本 🙂"]


def rank_ids(ranks, pattern, text):
    """Ids by definition: in a word, the neighbours whose union has the lowest rank merge first."""
    found = []
    for word in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            unions = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            i = unions.index(min(unions))
            if unions[i] == len(ranks):
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += map(ranks.get, parts)
    return found


@pytest.fixture(scope="module")
def ranks():
    """The tokens of a byte-level tokenizer in bytes, in the order of their ids, without EOS."""
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokens = trained(gpt2).get_vocab(with_added_tokens=False)
    ordered = sorted(tokens.keys() - {EOS}, key=tokens.get)
    return {bytes(map(letters.get, token)): rank for rank, token in enumerate(ordered)}


@pytest.fixture
def converted(tmp_path):
    """Function that converts a tokenizer's files and returns their folder."""

    def convert(**files):
        raw, folder = tmp_path / "raw", tmp_path / "converted"
        raw.mkdir()
        folder.mkdir()
        for name, content in files.items():
            (raw / name.replace("_", ".", 1)).write_bytes(content)
        tokenizer_files.convert("source", raw, folder)
        return folder

    return convert


def tiktoken_lines(ranks):
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


@pytest.mark.parametrize(
    ("model", "pattern", "special"),
    [("llama", ranked_files.LLAMA3_PATTERN, 256), ("llama4", ranked_files.LLAMA4_PATTERN, 2048)],
)
def test_tiktoken_file_of_llama_gives_its_ids(converted, ranks, model, pattern, special):
    config = json.dumps({"model_type": model}).encode()
    folder = converted(tokenizer_model=tiktoken_lines(ranks), config_json=config)
    loaded, size = tokenizer_files.load(folder), len(ranks)
    for text in TEXTS:
        ids = rank_ids(ranks, pattern, text)
        assert loaded.encode(text).ids == [size, *ids]
        assert loaded.decode(ids) == text
    assert loaded.get_vocab_size() == size + special
    assert tokenizer_files.special_token_id(folder, loaded, "eos_token") == size + 1


def test_tiktoken_file_of_another_model_is_rejected(converted, ranks):
    with pytest.raises(
        ProfileError, match=r"tokenizer\.model cannot be read: it has 493 tokens in tiktoken's"
    ):
        converted(tokenizer_model=tiktoken_lines(ranks))


@pytest.mark.parametrize("listed", [True, False])
def test_tekken_file_of_mistral_gives_its_ids(converted, ranks, listed):
    pattern, kept = ranked_files.LLAMA4_PATTERN, 450  # the other tokens of the file are padding
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()
    ]
    special = [{"rank": i, "token_str": name} for i, name in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    sizes = {"default_vocab_size": kept + 30, "default_num_special_tokens": 30}
    content = {"config": {"pattern": pattern, **sizes}, "vocab": vocabulary}
    content |= {"special_tokens": special} if listed else {}
    folder = converted(tekken_json=json.dumps(content).encode())
    loaded = tokenizer_files.load(folder)
    used = {token: rank for token, rank in ranks.items() if rank < kept}
    for text in TEXTS:
        assert loaded.encode(text).ids == [30 + rank for rank in rank_ids(used, pattern, text)]
    assert loaded.get_vocab_size() == kept + 30
    assert loaded.token_to_id("[INST]") == 3
    ids = [tokenizer_files.special_token_id(folder, loaded, name) for name in ("bos_token", "eos_token")]
    assert ids == [1, 2]
