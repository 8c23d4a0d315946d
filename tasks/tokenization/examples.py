"""Training examples from records: token ids, marked by whether the loss counts them.

A token that the loss does not count is stored as its complement, ~id, which is negative: one array holds both. The first token of
a sequence is never counted, since nothing predicts it.

    sft         messages (or conversations) · prompt and completion · instruction, input or both, and output
    dpo, orpo   prompt, chosen, rejected, of strings or messages; without a prompt, the common beginning of chosen and rejected

Prompt and completion have the tokens of their joined text, as in TRL, so that a completion never begins with the space that a
SentencePiece tokenizer writes before a text. The completion starts at the first token that a prompt alone lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tasks.tokenization import engines, tokenizer_files
from tasks.tokenization.chat_templates import ChatTemplate, Message, TemplateFailed

# Fields of a prompt, by that of the answer.
PROMPTS = {"completion": ("prompt",), "output": ("instruction", "input")}
CHATS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


class UnusableRecord(ValueError):
    """A record that lacks what its objective trains on."""


@dataclass(frozen=True)
class RecordOptions:
    """How records become examples; the keys of a profile's `objective`, as a plan carries them."""

    kind: str
    template: str | None  # its source
    sequence_length: int
    too_long: str
    maximum_prompt_length: int | None
    truncation: str


@dataclass(frozen=True)
class Example:
    """The sequences of one record: one, or the chosen and the rejected one; empty if it is too long."""

    sequences: tuple[np.ndarray, ...]
    truncated: bool
    bytes: int  # of its text, in UTF-8


@dataclass
class Examples:
    """Converts records to examples.

    Args:
        folder: of the tokenizer.
        bos, eos: ids that begin and end each sequence of prompt and completion; templates have their own.
    """

    folder: Path
    options: RecordOptions
    bos: list[int]
    eos: list[int]

    def __post_init__(self) -> None:
        self._plain = engines.load_tokenizer(self.folder)  # special tokens in text are plain text

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self.folder, self.options.template)

    @cached_property
    def _special(self) -> Tokenizer:
        return tokenizer_files.load(self.folder)

    def unknown_markers(self) -> list[str]:
        """Chat template markers that the tokenizer lacks; empty if no record needed the template."""
        markers = self._chat.markers if "_chat" in vars(self) else []
        return [marker for marker in markers if self._special.token_to_id(marker) is None]

    def of(self, record: Mapping[str, Any]) -> Example:
        """The example of a record. Raises UnusableRecord, TemplateFailed."""
        s = self.options.sequence_length
        if self.options.kind == "sft":
            sequence, size = self._answered(record)
            sequences, truncated = (sequence[:s],), len(sequence) > s
        else:
            prompt, answers, size = self._pair(record)
            fitted, truncated = self._fit(prompt, answers)
            sequences = tuple(_marked(prompt, answer) for prompt, answer in fitted)
        usable = all((each[1:] >= 0).any() for each in sequences)
        dropped = not usable or (truncated and self.options.too_long == "drop")
        return Example(() if dropped else sequences, truncated, size)

    def _answered(self, record: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        """The marked ids of a record's prompt and answer, or of its conversation, and the bytes of its text."""
        for name in CHATS:
            if record.get(name):
                return self._conversation(_messages(record[name]))
        for answer, prompts in PROMPTS.items():
            if record.get(answer) is not None:
                asked, answered = _joined(record, prompts), record[answer]
                if not answered:
                    raise UnusableRecord(f"{answer} is empty")
                if isinstance(asked, str) and isinstance(answered, str):
                    prompt, (answer,) = _split(self._plain, asked, [answered])
                    ids = [*self.bos, *prompt], [*answer, *self.eos]
                    return _marked(*ids), _size(asked, answered)
                return self._conversation([*_messages(asked), *_messages(answered, "assistant")])
        raise UnusableRecord(f"no messages, and no prompt with a completion; its fields: {_names(record)}")

    def _conversation(self, messages: Sequence[Message]) -> tuple[np.ndarray, int]:
        text, turns = self._chat.with_answers(messages)
        if not turns:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise UnusableRecord(f"no turn of the role assistant; its roles: {roles or 'none'}")
        self._require_plain(messages)
        encoding = self._special.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets])
        counted = np.zeros(len(starts), bool)
        for start, end in turns:
            counted |= (starts >= start) & (starts < end)
        counted[:1] = False
        ids = np.array(encoding.ids, np.int64)
        return np.where(counted, ids, ~ids).astype(np.int32), _size(text)

    def _pair(self, record: Mapping[str, Any]) -> tuple[list[int], list[list[int]], int]:
        """The ids of a pair's prompt, chosen and rejected answer, and the bytes of their text."""
        prompt = record.get("prompt")
        for name in ("chosen", "rejected"):
            if not record.get(name):
                raise UnusableRecord(f"{name} is missing or empty; its fields: {_names(record)}")
        answers = [record["chosen"], record["rejected"]]
        if all(isinstance(answer, str) for answer in answers) and isinstance(prompt, str | None):
            return self._text_pair(prompt, answers)
        return self._chat_pair(prompt, [_messages(answer, "assistant") for answer in answers])

    def _text_pair(self, prompt: str | None, answers: list[str]) -> tuple[list[int], list[list[int]], int]:
        if prompt is None:
            prompt = _shared_words(*answers)
            answers = [answer[len(prompt) :] for answer in answers]
        asked, ids = _split(self._plain, prompt, answers)
        return [*self.bos, *asked], [[*answer, *self.eos] for answer in ids], _size(prompt, *answers)

    def _chat_pair(self, prompt: Any, chats: list[list[Message]]) -> tuple[list[int], list[list[int]], int]:
        equal = [a == b for a, b in zip(*chats, strict=False)]
        shared = equal.index(False) if False in equal else len(equal)
        given, asked, chats = _messages(prompt or []), chats[0][:shared], [chat[shared:] for chat in chats]
        # Conversations that begin with the question contain the prompt, which some datasets give a second time. Others continue
        # the prompt: they begin with a turn of the other speaker.
        if not asked or (
            given and given[-1] not in asked and asked[0]["role"] not in ("system", given[-1]["role"])
        ):
            asked = [*given, *asked]
        self._require_plain([*asked, *chats[0], *chats[1]])
        before = self._chat.render(asked, answer_next=True)
        texts = [self._chat.render([*asked, *chat]) for chat in chats]
        if not all(text.startswith(before) for text in texts):
            raise TemplateFailed("the chat template changes earlier turns, so that answers cannot be located")
        ids = _split(self._special, before, [text[len(before) :] for text in texts])
        return *ids, _size(*texts)

    def _fit(
        self, prompt: list[int], answers: list[list[int]]
    ) -> tuple[list[tuple[list[int], list[int]]], bool]:
        """Prompt and answer of each sequence, cut to the sequence length, and whether anything was cut.

        If the longer answer does not fit, the prompt is cut first, then the answers.
        """
        s, options = self.options.sequence_length, self.options
        cut = len(prompt) + max(map(len, answers)) > s
        limit = options.maximum_prompt_length or s // 2
        if cut and len(prompt) > limit:
            prompt = prompt[:limit] if options.truncation == "keep_start" else prompt[-limit:]
        return [(prompt, answer[: s - len(prompt)]) for answer in answers], cut

    def _require_plain(self, messages: Sequence[Message]) -> None:
        """Reject messages with a special token's text, with which their author could forge other turns."""
        for message in messages:
            if any(token in message["content"] for token in self._special_texts):
                raise UnusableRecord("a message has the text of a special token")

    @cached_property
    def _special_texts(self) -> list[str]:
        return [token.content for token in self._special.get_added_tokens_decoder().values() if token.special]


def _split(tokenizer: Tokenizer, prompt: str, answers: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Ids of a prompt, and of each answer, in their joined text; a token across their boundary is the answer's."""
    try:
        alone, *joined = (
            tokenizer.encode(text, add_special_tokens=False).ids
            for text in (prompt, *(prompt + answer for answer in answers))
        )
    except UnicodeEncodeError as error:
        raise UnusableRecord("its text cannot be encoded") from error
    start = min(_shared_length(alone, ids) for ids in joined)
    return alone[:start], [ids[start:] for ids in joined]


def _joined(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The prompt in a record's fields, a text or messages; two texts are separated by an empty line."""
    parts = [record[name] for name in names if record.get(name)]
    if len(parts) < 2:
        return parts[0] if parts else ""
    if not all(isinstance(part, str) for part in parts):
        raise UnusableRecord(f"{' and '.join(names)} are not both text")
    return "\n\n".join(parts)


def _marked(prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Ids of a prompt and its answer, int32; only those of the answer count."""
    ids = np.array([*prompt, *answer], np.int32)
    ids[: max(1, len(prompt))] = ~ids[: max(1, len(prompt))]
    return ids


def _messages(value: Any, role: str = "user") -> list[Message]:
    """Messages with role and content, from a record's messages or a text. Raises UnusableRecord."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise UnusableRecord(
            f"type {type(value).__name__} is neither a text nor a list of messages with role and content"
        )
    found = []
    for message in value:
        name, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(name, str) or not isinstance(content, str):
            raise UnusableRecord(
                f"a message needs a role and a text as content; its fields: {_names(message)}"
            )
        found.append({"role": ROLES.get(name, name), "content": content})
    return found


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "none"


def _shared_words(a: str, b: str) -> str:
    """The common beginning of two texts, up to the end of a line or word."""
    length = _shared_length(a, b)
    return a[: max(a.rfind("\n", 0, length), a.rfind(" ", 0, length)) + 1]


def _shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _size(*texts: str) -> int:
    return sum(len(text.encode(errors="replace")) for text in texts)
