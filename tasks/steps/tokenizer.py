"""Tokenizer step: fetched from a hub repository or a folder, or trained on the profile's own text."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.schema import Profile
from tasks import keys
from tasks.sources.formats import records
from tasks.sources.shard import Shard, SourceError
from tasks.step import Context, Step
from tasks.store.artifacts import Artifact
from tasks.tokenization.chat_templates import TemplateFailed, own_templates
from tasks.tokenization.conversations import UnusableRecord
from tasks.tokenization.dataset_plan import record_options, require_special_tokens
from tasks.tokenization.examples import Examples, RecordOptions
from tasks.tokenization.tokenizer_fetch import fetch_folder, fetch_hub, folder_digest
from tasks.tokenization.tokenizer_files import convert, load, special_token_id
from tasks.tokenization.tokenizer_training import held_out_fraction, holds_out_long_files, train

WITHOUT_TEXT = ("tokens", "megatron")  # formats of tokenized sources


@dataclass
class TokenizerStep(Step):
    """Publishes the profile's tokenizer as a folder with tokenizer.json and tokenizer_config.json.

    The artifact's summary: vocabulary_size (largest token id + 1), eos and bos (ids or None), source, revision (a commit),
    templates (names of its chat templates).
    """

    kind = "tokenizer"
    name = "tokenizer"

    def title(self, profile: Profile) -> str:
        source = profile.tokenizer.source
        return "tokenizer trained on the data" if source == "train" else f"tokenizer from {source}"

    def key(self, context: Context) -> str:
        """From the training text and vocabulary size, the commit of a hub revision, or a folder's contents."""
        profile, pinned = context.profile, context.inputs.tokenizer
        if pinned is not None:
            return keys.tokenizer(**pinned)
        shards, size = _shards_with_text(context.inputs.shards), profile.tokenizer.vocabulary_size
        fraction = profile.data.validation_fraction
        fractions = [held_out_fraction(shard, fraction) for shard in shards]
        # One number if it holds for all shards, as in the keys of earlier versions.
        held_out = fractions[0] if len(set(fractions)) == 1 else fractions
        # Recipe 1 also trained on long files that are held out.
        recipe = {"recipe": 2} if any(holds_out_long_files(shard, fraction) for shard in shards) else {}
        texts = [shard.digest for shard in shards]
        return keys.tokenizer(texts=texts, size=size, held_out=held_out, **recipe)

    def make(self, context: Context, key: str) -> Artifact:
        """Fetch or train the tokenizer.

        Raises:
            ProfileError: the source has none.
            SourceError: the training text is corrupted, or has changed since it was resolved.
        """
        profile, token, pinned = context.profile, context.token, context.inputs.tokenizer
        source, revision = profile.tokenizer.source, None
        summary: dict[str, object] = {}
        with (
            context.store.artifacts.publish(self.id(key), summary) as folder,
            tempfile.TemporaryDirectory() as download,
        ):
            if pinned is None:
                shards, size = _shards_with_text(context.inputs.shards), profile.tokenizer.vocabulary_size
                assert size is not None  # a tokenizer that is trained has one
                context.progress(f"training a tokenizer of {size:,} tokens", None)
                train(shards, profile.data.validation_fraction, size, folder, token)
            elif "contents" in pinned:
                fetch_folder(source, Path(download))
                if folder_digest(download) != pinned["contents"]:
                    reason = "its files have changed since the run's inputs were resolved; --update resolves them again"
                    raise ProfileError("tokenizer.source", source, reason)
                convert(source, Path(download), folder)
            else:
                revision = pinned["commit"]
                context.progress(f"fetching {source} at {revision[:12]}", None)
                fetch_hub(source, revision, token, Path(download))
                convert(source, Path(download), folder)
            summary.update(_summary(folder, source, revision))
        return context.store.artifacts.expect(self.id(key))

    def describe(self, summary: Mapping[str, Any]) -> str:
        source = summary["source"]
        made = "trained on the data" if source == "train" else f"from {source}"
        return f"{summary['vocabulary_size']:,} tokens, {made}"


def check_fits(profile: Profile, summary: Mapping[str, Any]) -> None:
    """Raise ProfileError for a tokenizer without a needed BOS or EOS, or larger than the embedding."""
    if (size := summary["vocabulary_size"]) > profile.model.vocab_size:
        reason = f"the tokenizer has {size} tokens, and each needs an embedding"
        raise ProfileError("model.vocab_size", profile.model.vocab_size, reason, (f"{size} or more",))
    require_special_tokens(profile, summary)


def check_records(profile: Profile, folder: Path) -> None:
    """Raise ProfileError if the tokenizer lacks the chat template that the first local records need."""
    if options := record_options(profile):
        examples = Examples(folder, RecordOptions(**options), [], [])
        for number, data in enumerate(profile.data.sources):
            # Others may follow: what they lack is counted when they are read.
            with suppress(UnusableRecord, TemplateFailed, SourceError, OSError):
                if (record := records.first_local(data, f"data.sources.{number}")) is not None:
                    examples.of(record)


def check_folder(profile: Profile) -> None:
    """Check a tokenizer in a local folder before any step runs; others are checked once fetched.

    Raises:
        ProfileError: no tokenizer that can be read, or one that does not fit the model and the data.
    """
    source = profile.tokenizer.source
    if source == "train" or "://" in source or not state_files.is_dir(Path(source).expanduser()):
        return
    with tempfile.TemporaryDirectory() as raw, tempfile.TemporaryDirectory() as converted:
        folder = Path(converted)
        fetch_folder(source, Path(raw))
        convert(source, Path(raw), folder, load=False)
        check_fits(profile, _summary(folder, source, None))
        check_records(profile, folder)


def _summary(folder: Path, source: str, revision: str | None) -> dict[str, Any]:
    """The summary of a tokenizer in its final form."""
    tokenizer = load(folder)
    eos, bos = (special_token_id(folder, tokenizer, name) for name in ("eos_token", "bos_token"))
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    named = {"source": source, "revision": revision, "templates": [*own_templates(folder)]}
    return {"vocabulary_size": size, "eos": eos, "bos": bos, **named}


def _shards_with_text(shards: Sequence[Shard]) -> list[Shard]:
    """The shards that a tokenizer can be trained on."""
    found = [shard for shard in shards if shard.format not in WITHOUT_TEXT and shard.use != "validation"]
    if not found:
        raise ProfileError("tokenizer.source", "train", "no source has text to train a tokenizer on")
    return found
