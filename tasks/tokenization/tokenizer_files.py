"""Converts tokenizer files to a folder that `AutoTokenizer` and `tokenizers` load with equal results.

Reads tokenizer.json, Mistral's tekken.json, a tokenizer.model of SentencePiece (Llama 2) or tiktoken (Llama 3 and 4), or
vocab.json with merges.txt (GPT-2). The folder holds tokenizer.json, copied as it is or converted, and tokenizer_config.json,
which names the special tokens. Tokens that only other files declare are added (added_tokens.json, added_tokens_decoder). Chat
templates of several names are listed in tokenizer_config.json, also if the source has a file for each.
"""

from __future__ import annotations

import codecs
import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from profiles.errors import ProfileError
from profiles.files import folders, state_files
from tasks.tokenization import ranked_files

if TYPE_CHECKING:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

log = logging.getLogger(__name__)
_importing = threading.Lock()

# Each a JSON object.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "added_tokens.json")
# Names of special tokens, which transformers passes to chat templates, too.
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")  # lists; the latter may be an object
ADDED_TOKEN = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # its fields
# Byte order marks, and the encodings that remove them.
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # arguments of transformers
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
# File of the default, folder of others.
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
EOS = "<|endoftext|>"  # GPT-2's
DEFAULT_EOS = (EOS, "<|end_of_text|>", "</s>")  # tried in order if the source names no EOS token


def convert(source: str, raw: Path, folder: Path, *, load: bool = True) -> None:
    """Convert tokenizer files, and write tokenizer.json and tokenizer_config.json.

    Args:
        raw: folder of the files, a copy; byte order marks are removed from them.
        folder: where the result is written.
        load: whether to load it with `AutoTokenizer` too, which imports transformers.

    Raises:
        ProfileError: no supported tokenizer files, or corrupted ones, or `AutoTokenizer` cannot load the result; names
            tokenizer.source = `source`.
    """
    path = raw
    try:
        for path in sorted(raw.iterdir()):
            _remove_mark(path)
        settings = {}
        for name in SETTINGS:
            path = raw / name
            settings[name] = json.loads(path.read_text()) if state_files.exists(path) else {}
            if not isinstance(settings[name], dict):
                raise ValueError("it is not a JSON object")
        path = _model_file(source, raw)
        tokenizer, special = _load_model(path, settings)
        added = _add_declared(tokenizer, settings)
        if path.name == "tokenizer.json" and not added:
            shutil.copyfile(path, folder / path.name)
        path = raw / SETTINGS[0]
        configuration = _configuration(settings, tokenizer, special)
        path = raw / TEMPLATES
        if named := {file.stem: file.read_text("utf-8-sig") for file in folders.matches(path, "*.jinja")}:
            path = raw / TEMPLATE
            given = path.read_text() if state_files.exists(path) else configuration.get("chat_template")
            named = {"default": given, **named} if isinstance(given, str) else named
            listed = [{"name": name, "template": template} for name, template in named.items()]
            configuration["chat_template"] = listed
        elif state_files.exists(path := raw / TEMPLATE):
            shutil.copyfile(path, folder / path.name)
        path = raw / SETTINGS[0]
        write(folder, tokenizer, configuration)
        path = folder / "tokenizer.json"
        if load:
            check_loads(folder)
    except (ProfileError, OSError):
        raise
    except Exception as error:  # the parsers raise plain Exceptions
        raise ProfileError("tokenizer.source", source, f"{path.name} cannot be read: {error}") from error


def _auto_tokenizer() -> Any:
    """AutoTokenizer, imported by one thread at a time: runs of a ladder export at the same time."""
    with _importing:
        from transformers import AutoTokenizer

    return AutoTokenizer


def check_loads(folder: Path) -> None:
    """Raise ValueError unless `AutoTokenizer` loads a folder's tokenizer, with the same special tokens.

    Raises OSError if its files cannot be read.
    """
    auto = _auto_tokenizer()
    with state_files.local_copy(folder, (".json", ".jinja")) as copy:
        try:
            found = auto.from_pretrained(copy, config=_model_config(copy), **LOCAL)
        except Exception as error:
            # Of the file system, not of the tokenizer.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(f"AutoTokenizer cannot load it: {type(error).__name__}: {error}") from error
        tokenizer = load(copy)
        for name in ("bos_token", "eos_token"):
            expected, actual = special_token_id(copy, tokenizer, name), getattr(found, f"{name}_id")
            if expected not in (actual, None):
                raise ValueError(f"AutoTokenizer reads {actual} as {name}_id, not {expected}")


def _model_config(folder: Path) -> Any:
    """What `AutoTokenizer` reads of config.json, the model's type; None if there is no config.json.

    The module of the type's own class takes 1.4 s of CPU to import: Dynamo, and much else of torch.
    """
    from transformers import PreTrainedConfig

    path = folder / "config.json"
    if not state_files.exists(path):
        return None
    config = PreTrainedConfig()
    config.model_type = json.loads(path.read_text()).get("model_type", "")
    return config


def write(folder: Path, tokenizer: Tokenizer, configuration: dict[str, Any]) -> None:
    """Write tokenizer.json, unless it exists, and tokenizer_config.json."""
    if not state_files.exists(folder / "tokenizer.json"):
        tokenizer.save(str(folder / "tokenizer.json"))
    # The class that uses tokenizer.json unchanged; a model's own tokenizer class may replace parts of it.
    configuration = {**typed_tokens(configuration), "tokenizer_class": "PreTrainedTokenizerFast"}
    text = json.dumps(configuration, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def typed_tokens(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json whose special tokens transformers can load.

    Objects have their type, and none is null or false.

    Raises:
        ValueError: a special token is neither a text nor an object with its content.
    """
    typed = dict(configuration)
    for name in {*SPECIAL, *MORE_SPECIAL} & typed.keys():
        if not typed[name]:
            del typed[name]
        elif name in SPECIAL and not isinstance(_content(typed[name]), str):
            raise ValueError(f"{name} is {typed[name]!r}, neither a text nor an object with its content")
        else:
            typed[name] = _typed(typed[name])
    return typed


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer of an artifact's folder, with truncation and padding disabled."""
    tokenizer = Tokenizer.from_buffer(state_files.contents(Path(folder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def has_plain_added_tokens(folder: Path) -> bool:
    """Whether the folder's tokenizer has added tokens that are not special, such as <think>."""
    state = json.loads(state_files.contents(folder / "tokenizer.json"))
    return any(not token["special"] for token in state["added_tokens"])


def special_token_id(folder: Path, tokenizer: Tokenizer, name: str) -> int | None:
    """Id of the folder's "eos_token", "bos_token" or "pad_token"; None if it names none."""
    content = _content(json.loads(state_files.contents(folder / "tokenizer_config.json")).get(name))
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


def _model_file(source: str, raw: Path) -> Path:
    """The file with the vocabulary. Raises ProfileError."""
    for name in ("tokenizer.json", "tekken.json", "tokenizer.model"):
        if state_files.exists(raw / name):
            return raw / name
    if (path := _find_file(raw, "vocab.json")) and _find_file(raw, "merges.txt"):
        return path
    found = ", ".join(sorted(path.name for path in raw.iterdir() if state_files.is_file(path))) or "nothing"
    wanted = "tokenizer.json, tekken.json, tokenizer.model, or vocab.json with merges.txt"
    raise ProfileError("tokenizer.source", source, f"contains {found}; a tokenizer needs {wanted}")


def _load_model(path: Path, settings: Mapping[str, dict[str, Any]]) -> tuple[Tokenizer, dict[str, str]]:
    """Tokenizer from the file with its vocabulary, and the special tokens that this implies."""
    given, _, model, _ = (settings[name] for name in SETTINGS)
    if path.name == "tokenizer.json":
        tokenizer = Tokenizer.from_file(str(path))
        _require_same_ids(tokenizer, json.loads(path.read_text()))
        return tokenizer, {}
    if path.name == "tekken.json":
        return ranked_files.from_tekken(path)
    if path.name == "tokenizer.model":
        if ranked_files.is_tiktoken(path):
            return ranked_files.from_tiktoken(
                path, model, has_special=bool(given.get("added_tokens_decoder"))
            )
        return from_sentencepiece(path)
    # May split words otherwise than GPT-2.
    if given.get("tokenizer_class", GPT2_CLASSES[0]) not in GPT2_CLASSES:
        return _auto_tokenizer().from_pretrained(path.parent, **LOCAL).backend_tokenizer, {}
    merges = _find_file(path.parent, "merges.txt")
    assert merges is not None  # `_model_file` found it
    return from_vocabulary(path, merges)


def _add_declared(tokenizer: Tokenizer, settings: Mapping[str, dict[str, Any]]) -> bool:
    """Add the tokens that only the settings declare, as transformers does; returns whether there were any.

    Raises:
        ValueError: the tokenizer cannot give one its declared id.
    """
    given, special_map, _, plain = (settings[name] for name in SETTINGS)
    declared = {int(i): _added_token(fields) for i, fields in given.get("added_tokens_decoder", {}).items()}
    if not declared:
        special = set(map(_content, _special_tokens({**given, **special_map})))
        for content, i in plain.items():
            is_special = content in special
            declared[i] = AddedToken(content, special=is_special, normalized=not is_special)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = {i: token for i, token in sorted(declared.items()) if token.content not in known}
    for i, token in missing.items():
        tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != i:
            reason = f"the added token {token.content!r} has id {i}, which tokenizers would not give it but {found}"
            raise ValueError(f"{reason}; save the tokenizer with transformers first")
    return bool(missing)


def _require_same_ids(tokenizer: Tokenizer, state: dict[str, Any]) -> None:
    """Raise ValueError if `tokenizers`, which numbers added tokens in order, read other ids."""
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
    given, special_map, model, _ = (settings[name] for name in SETTINGS)
    given.pop("auto_map", None)  # refers to code
    configuration = {name: value for name, value in typed_tokens(given).items() if value is not None}
    for name in SPECIAL:
        ids = model.get(f"{name}_id")
        index = ids[0] if isinstance(ids, list) and ids else ids
        by_id = tokenizer.id_to_token(index) if type(index) is int and index >= 0 else None
        token = special_map.get(name) or special.get(name) or by_id
        if special_map.get(name) and "added_tokens_decoder" not in given:  # transformers prefers it then
            if _content(configuration.get(name, token)) != _content(token):
                reason = (
                    "%s is %r of special_tokens_map.json, as in transformers, not %r of tokenizer_config.json"
                )
                log.warning(reason, name, _content(token), _content(configuration[name]))
            configuration[name] = token
        elif token:
            configuration.setdefault(name, token)
    for name in MORE_SPECIAL:  # transformers would add those that the vocabulary lacks, at any id
        found = special_map.get(name)
        if isinstance(found, list):
            found = [token for token in found if tokenizer.token_to_id(_content(token)) is not None]
        if found:
            configuration.setdefault(name, found)
    default = next((token for token in DEFAULT_EOS if tokenizer.token_to_id(token) is not None), None)
    return configuration if default is None else {"eos_token": default, **configuration}


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[Any]:
    """The special tokens that a tokenizer_config.json or special_tokens_map.json names."""
    yield from (settings[name] for name in SPECIAL if settings.get(name))
    for more in filter(None, map(settings.get, MORE_SPECIAL)):
        yield from more.values() if isinstance(more, Mapping) else more


def _content(token: Any) -> Any:
    """The text of a special token, which files give as a text or as an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{name: fields[name] for name in ADDED_TOKEN if name in fields})


def _typed(value: Any) -> Any:
    """Special tokens in a JSON value, marked with the type that transformers needs."""
    if isinstance(value, list):
        return [_typed(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if "content" in value:
        return {"__type": "AddedToken", **{name: value[name] for name in ADDED_TOKEN if name in value}}
    return {name: _typed(each) for name, each in value.items()}


def _remove_mark(path: Path) -> None:
    """Rewrite a text file that begins with a byte order mark as UTF-8 without one."""
    if path.suffix in (".json", ".txt", ".jinja"):
        data = path.read_bytes()
        encoding = next((name for mark, name in MARKS.items() if data.startswith(mark)), None)
        if encoding:
            path.write_bytes(data.decode(encoding).encode())


def _find_file(folder: Path, name: str) -> Path | None:
    """The only file whose name ends with `name`, such as gpt2-vocab.json."""
    found = folders.matches(folder, f"*{name}")
    return found[0] if len(found) == 1 else None
