"""Small tokenizers of every supported kind, and the text they are trained on."""

import functools
import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tasks.tokenization.tokenizer_files import EOS, byte_level

RANDOM = random.Random(0)
WORDS = [
    "the",
    "Ελλάδα",
    "naïve",
    "it's",
    "2024",
    "x=1;",
    "日本語。",
    "don't",
    "a",
    "und",
    "…",
    "  ",
    "\t",
    "3.14",
]
ENDS = [" ", " ", " ", "\n", "\n\n", ". ", ", ", "\r\n"]
PROSE = "".join(RANDOM.choice(WORDS) + RANDOM.choice(ENDS) for _ in range(20_000))
DOCUMENTS = [PROSE[start : start + 300] for start in range(0, 60_000, 300)]


def of_bytes(special):
    """A tokenizer whose tokens are single bytes, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = byte_level(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def gpt2():
    return train(byte_level(models.BPE()))


def llama3():
    tokenizer = Tokenizer(models.BPE())
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer)


def qwen3():
    """Qwen3: as Llama 3, in NFC."""
    tokenizer = llama3()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def deepseek():
    """DeepSeek Coder: several splits one after another, single digits."""
    tokenizer = Tokenizer(models.BPE())
    splits = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return train(tokenizer)


def metaspace():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return train(tokenizer, "<unk>")


def llama2():
    """Llama 2 as converted from SentencePiece: no pre-tokenizer (one is used for training only)."""
    tokenizer = metaspace()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = prepend_marker()
    return tokenizer


def unsplit():
    """Llama 2 as newer versions of transformers write it: a marker before the text, no splits."""
    tokenizer = metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def byte_fallback():
    """Llama 2 as converted from SentencePiece, with tokens for the bytes of unknown characters."""
    state = json.loads(trained(llama2).to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    state["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(state))


def spanning_spaces():
    """A tokenizer whose tokens span several words, since it was trained without a pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = prepend_marker()
    return train(tokenizer, "<unk>", texts=DOCUMENTS)  # as one word, PROSE takes long


def prepend_marker():
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def add_tokens(tokenizer):
    """Add tokens that are not special among 80 special ones; returns the former."""
    plain = [
        AddedToken("<think>", normalized=False),
        AddedToken("</think>", normalized=True),
        AddedToken("<tool>", lstrip=True),
        AddedToken("<é>", normalized=False),
        AddedToken("    ", normalized=False),
    ]
    special = [AddedToken(f"<|{i}|>", special=True, normalized=False) for i in range(80)]
    for i, token in enumerate(plain):
        tokenizer.add_special_tokens(special[16 * i : 16 * i + 16])
        tokenizer.add_tokens([token])
    return plain


def train(tokenizer, *special, texts=(PROSE,)):
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(special or [EOS]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@functools.cache
def _state(kind) -> str:
    return kind().to_str()


def trained(kind) -> Tokenizer:
    """A tokenizer of this kind (one of the functions above), trained once per process."""
    return Tokenizer.from_str(_state(kind))
