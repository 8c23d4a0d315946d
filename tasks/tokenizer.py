"""Tokenizer step: fetched from a hub repository or a folder, or trained on the profile's own text."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import models, pre_tokenizers, trainers

from profiles.errors import ProfileError
from profiles.hub import resolve_commit
from profiles.schema import Data, Profile
from tasks import keys
from tasks.sources import corpus, readers
from tasks.sources.long_text import LongText
from tasks.sources.shard import Shard
from tasks.store.artifacts import Artifact
from tasks.store.digest_cache import DigestCache
from tasks.store.store import Store
from tasks.tokenization.tokenizer_fetch import fetch_folder, fetch_hub, folder_digest, is_folder
from tasks.tokenization.tokenizer_files import EOS, byte_level, convert, load, special_id, write

KIND = "tokenizer"
TOKENIZED = ("tokens", "megatron")  # formats without text
Progress = Callable[[str, float], None]


def key(profile: Profile, token: str | None = None, store: Store | None = None) -> str:
    """Cache key of the step: of the text and the size where it is trained, of a commit, or of a folder's contents.

    A hub revision that is no commit is looked up, with `token` where it is not None; `store` remembers the digests of files.
    """
    source, revision = profile.tokenizer.source, profile.tokenizer.revision
    if source == "train":
        texts = [shard.digest for shard in _texts(profile.data, store, token)]
        return keys.tokenizer(
            texts=texts, size=profile.tokenizer.vocabulary_size, held_out=profile.data.validation_fraction
        )
    if is_folder(source):
        return keys.tokenizer(contents=folder_digest(source))
    return keys.tokenizer(
        repository=source, commit=resolve_commit(source, revision, token, "tokenizer.source")
    )


def run(
    profile: Profile, store: Store, token: str | None = None, progress: Progress | None = None
) -> Artifact:
    """Publish the profile's tokenizer as a folder with tokenizer.json and tokenizer_config.json, unless it is there.

    Its summary: vocabulary_size (the largest token id + 1), eos and bos (ids or None), source, revision (a commit).

    Args:
        token: for the hub; None takes the environment's HF_TOKEN. It is neither logged nor stored.
        progress: called with what is being done and how much of the step is behind it, 0 to 1.

    Raises:
        ProfileError: no tokenizer at the source.
    """
    report = progress or (lambda message, fraction: None)
    identity = key(profile, token, store)
    with store.artifacts.lock(KIND, identity):
        found = store.artifacts.find(KIND, identity)
        if found:
            return found
        source, revision = profile.tokenizer.source, None
        summary: dict[str, object] = {}
        with store.artifacts.publish(KIND, identity, summary) as folder, tempfile.TemporaryDirectory() as raw:
            if source == "train":
                report("reading the training text", 0.0)
                shards = _texts(profile.data, store, token)
                train(profile.data, shards, profile.tokenizer.vocabulary_size, folder, token)
            elif is_folder(source):
                fetch_folder(source, Path(raw))
                convert(source, Path(raw), folder)
            else:
                revision = resolve_commit(source, profile.tokenizer.revision, token, "tokenizer.source")
                report(f"fetching {source} at {revision[:12]}", 0.0)
                fetch_hub(source, revision, token, Path(raw))
                convert(source, Path(raw), folder)
            tokenizer = load(folder)
            eos, bos = (special_id(folder, tokenizer, name) for name in ("eos_token", "bos_token"))
            size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
            summary.update(vocabulary_size=size, eos=eos, bos=bos, source=source, revision=revision)
        report(f"{size} tokens", 1.0)
    return store.artifacts.expect(KIND, identity)


def check_fits(profile: Profile, tokenizer: Artifact) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings.

    Raises:
        ProfileError: naming model.vocab_size.
    """
    size = tokenizer.summary["vocabulary_size"]
    if size > profile.model.vocab_size:
        reason = f"the tokenizer has {size} tokens, each of which needs an embedding"
        raise ProfileError("model.vocab_size", profile.model.vocab_size, reason, (f"{size} or more",))


def train(data: Data, shards: list[Shard], size: int, folder: Path, token: str | None = None) -> None:
    """Train a byte-level BPE of `size` tokens, the 256 bytes and EOS among them, on the shards' training documents.

    The result depends on the documents alone: counts are exact and ties are broken by the pairs themselves.
    """
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(data, shards, token), trainer)
    write(folder, tokenizer, {"bos_token": EOS, "eos_token": EOS, "unk_token": EOS})


def _texts(data: Data, store: Store | None, token: str | None) -> list[Shard]:
    """The shards that a tokenizer can be trained on."""
    shards = corpus.shards(data, DigestCache(store.local_cache if store else None), token)
    found = [shard for shard in shards if shard.format not in TOKENIZED and shard.use != "validation"]
    if not found:
        raise ProfileError("tokenizer.source", "train", "no source has text to train it on")
    return found


def _training_texts(data: Data, shards: list[Shard], token: str | None) -> Iterator[str]:
    for shard in shards:
        fraction = data.validation_fraction if shard.use == "split" else 0.0
        for document in readers.documents(shard, token):
            if isinstance(document, LongText):
                yield from document.chunks()
            elif isinstance(document, str) and document and not corpus.held_out(document, fraction):
                yield document
