"""Converts tokenizer files to a folder that `AutoTokenizer` and `tokenizers` load with equal results.

Reads tokenizer.json, vocab.json with merges.txt (GPT-2), or a SentencePiece tokenizer.model (Llama 2). The folder holds
tokenizer.json, copied byte for byte or converted, and tokenizer_config.json, which names the special tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from profiles.errors import ProfileError

if TYPE_CHECKING:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")  # each a JSON object
EOS = "<|endoftext|>"  # GPT-2's
DEFAULT_EOS = (EOS, "<|end_of_text|>", "</s>")  # tried in order if the source names no EOS token


def convert(source: str, raw: Path, folder: Path) -> None:
    """Convert the tokenizer files in `raw` and write tokenizer.json and tokenizer_config.json to `folder`.

    Raises:
        ProfileError: no supported tokenizer files, or corrupted ones; names tokenizer.source = `source`.
    """
    try:
        if (path := raw / "tokenizer.json").exists():
            tokenizer, special = Tokenizer.from_file(str(path)), {}
            _require_same_ids(tokenizer, json.loads(path.read_text()))
            shutil.copyfile(path, folder / "tokenizer.json")
        elif (path := raw / "tokenizer.model").exists():
            tokenizer, special = from_sentencepiece(path)
        elif (path := _find_file(raw, "vocab.json")) and (merges := _find_file(raw, "merges.txt")):
            tokenizer, special = from_vocabulary(path, merges)
        else:
            found = ", ".join(sorted(path.name for path in raw.iterdir() if path.is_file())) or "nothing"
            wanted = "tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
            raise ProfileError("tokenizer.source", source, f"contains {found}; a tokenizer needs {wanted}")
    except (ProfileError, OSError):
        raise
    except Exception as error:  # the parsers raise plain Exceptions
        raise ProfileError("tokenizer.source", source, f"{path.name} cannot be read: {error}") from error
    settings = {}
    for name in SETTINGS:
        try:
            settings[name] = json.loads((raw / name).read_text()) if (raw / name).exists() else {}
            if not isinstance(settings[name], dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            raise ProfileError("tokenizer.source", source, f"{name} cannot be read: {error}") from error
    write(folder, tokenizer, _configuration(settings, tokenizer, special))
    if (raw / "chat_template.jinja").exists():
        shutil.copyfile(raw / "chat_template.jinja", folder / "chat_template.jinja")


def write(folder: Path, tokenizer: Tokenizer, configuration: dict[str, Any]) -> None:
    """Write tokenizer.json, unless it exists, and tokenizer_config.json."""
    if not (folder / "tokenizer.json").exists():
        tokenizer.save(str(folder / "tokenizer.json"))
    # The class that uses tokenizer.json unchanged; a model's own tokenizer class may replace parts of it.
    configuration = {**configuration, "tokenizer_class": "PreTrainedTokenizerFast"}
    text = json.dumps(configuration, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer of an artifact's folder, with truncation and padding disabled."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def has_plain_added_tokens(folder: Path) -> bool:
    """Whether the folder's tokenizer recognizes added tokens that are not special, such as <think>, in text."""
    state = json.loads((folder / "tokenizer.json").read_text())
    return any(not token["special"] for token in state["added_tokens"])


def special_token_id(folder: Path, tokenizer: Tokenizer, name: str) -> int | None:
    """Id of the folder's "eos_token", "bos_token" or "pad_token"; None if it names none."""
    token = json.loads((folder / "tokenizer_config.json").read_text()).get(name)
    content = token["content"] if isinstance(token, dict) else token
    return tokenizer.token_to_id(content) if content else None


def byte_level(model: models.BPE) -> Tokenizer:
    """A byte-level tokenizer with this model, as GPT-2's: encodes every text, and decoding restores it."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def from_vocabulary(vocabulary: Path, merges: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Tokenizer from GPT-2's vocab.json and merges.txt, and its special tokens."""
    tokenizer = byte_level(models.BPE.from_file(str(vocabulary), str(merges)))
    if tokenizer.token_to_id(EOS) is None:
        return tokenizer, {}
    tokenizer.add_special_tokens([EOS])
    return tokenizer, {"bos_token": EOS, "eos_token": EOS, "unk_token": EOS}


def from_sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Tokenizer and special tokens of a SentencePiece BPE model (Llama 2). Raises ValueError for others."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    proto = ModelProto.FromString(path.read_bytes())
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != trainer.BPE:
        raise ValueError("not a BPE model; convert it to tokenizer.json first")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise ValueError("the model normalizes characters or spaces; convert it to tokenizer.json first")
    kind = proto.SentencePiece
    if any(piece.type == kind.USER_DEFINED for piece in proto.pieces):
        raise ValueError("the model has user-defined symbols; convert it to tokenizer.json first")
    pieces = [piece.piece for piece in proto.pieces]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    options = {"unk_token": pieces[trainer.unk_id], "fuse_unk": True, "byte_fallback": trainer.byte_fallback}
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(proto, vocabulary), **options))
    prefix = [normalizers.Prepend("▁")] if normalizer.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(decoder)
    special = [piece.piece for piece in proto.pieces if piece.type in (kind.CONTROL, kind.UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    if trainer.bos_id >= 0:  # as Llama's tokenizer, which adds BOS with add_special_tokens=True
        bos = (pieces[trainer.bos_id], trainer.bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos[0]} $A", special_tokens=[bos])
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    return tokenizer, {name: pieces[i] for name, i in ids.items() if i >= 0}


def _merges(proto: ModelProto, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs that merge into a piece, highest score first: SentencePiece stores scores, not merges."""
    pieces = [piece for piece in proto.pieces if piece.type == proto.SentencePiece.NORMAL]
    merges = []
    for piece in sorted(pieces, key=lambda piece: -piece.score):
        splits = [(piece.piece[:i], piece.piece[i:]) for i in range(1, len(piece.piece))]
        merges += [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
    return merges


def _require_same_ids(tokenizer: Tokenizer, state: dict[str, Any]) -> None:
    """Raise ValueError if `tokenizers`, which numbers added tokens in their order, read other ids than the file's."""
    for token in state["added_tokens"]:
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"]:
            reason = (
                f"the added token {token['content']!r} has id {token['id']}, and tokenizers gives it {found}"
            )
            raise ValueError(f"{reason}; list the added tokens by id, without gaps after the vocabulary")


def _configuration(
    settings: dict[str, dict[str, Any]], tokenizer: Tokenizer, special: dict[str, str]
) -> dict[str, Any]:
    """The source's tokenizer_config.json, with special tokens that it lacks taken from the other files."""
    given, special_map, model = (settings[name] for name in SETTINGS)
    given.pop("auto_map", None)  # refers to code
    configuration = {name: value for name, value in given.items() if value is not None}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        ids = model.get(f"{name}_id")
        by_id = tokenizer.id_to_token(ids[0] if isinstance(ids, list) else ids) if ids is not None else None
        token = special_map.get(name) or special.get(name) or by_id
        if token:
            configuration.setdefault(name, token)
    default = next((token for token in DEFAULT_EOS if tokenizer.token_to_id(token) is not None), None)
    return configuration if default is None else {"eos_token": default, **configuration}


def _find_file(folder: Path, name: str) -> Path | None:
    """The only file whose name ends with `name`, such as gpt2-vocab.json."""
    found = list(folder.glob(f"*{name}"))
    return found[0] if len(found) == 1 else None
