"""Training examples from records: token ids, marked by whether the loss counts them.

A token that the loss does not count is stored as its complement, ~id, which is negative: one array holds both. The first token of
a sequence is never counted, since nothing predicts it.

    sft         messages (or conversations) · prompt and completion · instruction, input or both, and output
    dpo, orpo   prompt, chosen, rejected, of strings or messages; without a prompt, the common beginning of chosen and rejected

Each of them may have `system` and `history`, which come first; with messages also tools, documents and chat_template_kwargs.

Messages may be given as JSON texts, as in CSV files. If a record has a prompt and answers, all of them are JSON or none is.

Prompt and completion have the tokens of their joined text, as in TRL, so that a completion never begins with the space that a
SentencePiece tokenizer writes before a text. The completion starts at the first token that a prompt alone lacks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from profiles.sections.objective import OBJECTIVES
from tasks.tokenization import conversations, engines, tokenizer_files
from tasks.tokenization.chat_templates import REASONING, ChatTemplate
from tasks.tokenization.conversations import CONTEXT, VARIABLES, Conversation, UnusableRecord, names

# Fields of a prompt, by that of the answer.
PROMPTS = {"completion": ("prompt",), "output": ("instruction", "input")}
CHATS = ("messages", "conversations")
PAIR = ("prompt", "chosen", "rejected")
# Fields of a message without which a template would train on something else.
NEEDED = ("tool_calls", "function_call", *REASONING)


@dataclass(frozen=True)
class RecordOptions:
    """How records become examples; the keys of a profile's `objective`, as a plan carries them."""

    kind: str
    template: str | None  # its source
    sequence_length: int
    too_long: str
    maximum_prompt_length: int | None
    truncation: str
    turns: str = "all"  # or "last": turns of a conversation that the loss covers


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

    Attributes:
        unused: for each field that neither the objective nor the chat template uses, the number of records that have it.
        endless: number of records in which the loss leaves out the token that ends an answer.
    """

    folder: Path
    options: RecordOptions
    bos: list[int]
    eos: list[int]
    unused: Counter[str] = field(default_factory=Counter, init=False)
    endless: int = field(default=0, init=False)

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
        s, record = self.options.sequence_length, conversations.with_messages(record, CHATS)
        if OBJECTIVES[self.options.kind].pairs:
            prompt, answers, size = self._pair(record)
            fitted, truncated = self._fit(prompt, answers)
            sequences = [_marked(prompt, answer) for prompt, answer in fitted]
        else:
            sequence, size = self._answered(record)
            sequences, truncated = [sequence[:s]], len(sequence) > s
        usable = all((each[1:] >= 0).any() for each in sequences)
        dropped = not usable or (truncated and self.options.too_long == "drop")
        return Example(() if dropped else tuple(sequences), truncated, size)

    def _answered(self, record: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        """The marked ids of a record's prompt and answer, or of its conversation, and the bytes of its text."""
        for name in CHATS:
            if record.get(name):
                self._count_unused(record, (name,))
                if isinstance(record[name], str):
                    raise UnusableRecord(f"{name} is a text, neither a list of messages nor JSON of one")
                return self._conversation(
                    conversations.in_context(record, conversations.messages(record[name]))
                )
        for answer, prompts in PROMPTS.items():
            if record.get(answer) is not None:
                self._count_unused(record, (answer, *prompts))
                answered = record[answer]
                if not answered:
                    raise UnusableRecord(f"{answer} is empty")
                if isinstance(answered, str) and conversations.is_text(record, prompts):
                    self._require_no_variables(record)
                    asked = conversations.prompt_text(record, prompts)
                    prompt, (ids,) = _split(self._plain, asked, [answered])
                    return _marked([*self.bos, *prompt], [*ids, *self.eos]), _size(asked, answered)
                answers = conversations.messages(answered, "assistant")
                return self._conversation(conversations.prompt(record, prompts) + answers)
        raise UnusableRecord(f"no messages, and no prompt with a completion; its fields: {names(record)}")

    def _conversation(self, chat: Conversation) -> tuple[np.ndarray, int]:
        if not any(chat.trained):
            roles = [message["role"] for message in chat.messages]
            if "assistant" in roles:
                raise UnusableRecord(
                    "no turn of the assistant to train on: those of a prompt and of weight 0 do not count"
                )
            raise UnusableRecord(
                f"no turn of the role assistant; its roles: {', '.join(dict.fromkeys(roles)) or 'none'}"
            )
        if self.options.turns == "last":
            chat = chat.up_to_last_answer()
        self._require_usable(chat)
        text, turns = self._chat.with_answers(chat.messages, chat.trained, **chat.variables)
        encoding = _encode(self._special, text)
        starts = np.array([start for start, _ in encoding.offsets])
        counted = np.zeros(len(starts), bool)
        for start, end in turns:
            counted |= (starts >= start) & (starts < end)
        counted[:1] = False
        self.endless += self._leaves_out_end(text, turns)
        ids = np.array(encoding.ids, np.int64)
        return np.where(counted, ids, ~ids).astype(np.int32), _size(text)

    def _pair(self, record: Mapping[str, Any]) -> tuple[list[int], list[list[int]], int]:
        """The ids of a pair's prompt, chosen and rejected answer, and the bytes of their text."""
        prompt = record.get("prompt")
        for name in ("chosen", "rejected"):
            if not record.get(name):
                raise UnusableRecord(f"{name} is missing or empty; its fields: {names(record)}")
        self._count_unused(record, PAIR)
        answers = [record["chosen"], record["rejected"]]
        if all(isinstance(answer, str) for answer in answers) and isinstance(prompt, str | None):
            self._require_no_variables(record)
            return self._text_pair(record, answers)
        return self._chat_pair(record, [conversations.messages(answer, "assistant") for answer in answers])

    def _text_pair(
        self, record: Mapping[str, Any], answers: list[str]
    ) -> tuple[list[int], list[list[int]], int]:
        if record.get("prompt") is None:
            shared = _shared_words(*answers)
            answers = [answer[len(shared) :] for answer in answers]
            record = {**record, "prompt": shared}
        prompt = conversations.prompt_text(record, ("prompt",))
        asked, ids = _split(self._plain, prompt, answers)
        return [*self.bos, *asked], [[*answer, *self.eos] for answer in ids], _size(prompt, *answers)

    def _chat_pair(
        self, record: Mapping[str, Any], chats: list[Conversation]
    ) -> tuple[list[int], list[list[int]], int]:
        first, other = (chat.messages for chat in chats)
        equal = [a == b for a, b in zip(first, other, strict=False)]
        shared = equal.index(False) if False in equal else len(equal)
        given, asked = conversations.messages(record.get("prompt") or []).messages, first[:shared]
        # Conversations that begin with the question contain the prompt, which some datasets give a second time. Others continue
        # the prompt: they begin with a turn of the other speaker.
        if not asked or (
            given and given[-1] not in asked and asked[0]["role"] not in ("system", given[-1]["role"])
        ):
            asked = [*given, *asked]
        prompt = conversations.in_context(record, Conversation(asked, [False] * len(asked)))
        answers = [
            Conversation(chat.messages[shared:], chat.trained[shared:], prompt.variables) for chat in chats
        ]
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            if not all(answer.trained):
                roles = ", ".join(dict.fromkeys(message["role"] for message in answer.messages))
                reason = "its turns that differ must all be the assistant's, of weight 1"
                raise UnusableRecord(f"{name} cannot be used: {reason}; their roles: {roles}")
            self._require_usable(prompt + answer)
        texts = [
            self._chat.answered(prompt.messages, answer.messages, **prompt.variables) for answer in answers
        ]
        ids = _split(self._special, texts[0][0], [answer for _, answer in texts])
        return *ids, _size(*map("".join, texts))

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

    def _require_usable(self, chat: Conversation) -> None:
        """Reject a conversation that could forge other turns, or of which the template would leave out a part.

        An author could forge turns with the text of a special token.
        """
        if any(map(self._special_texts.search, chat.texts())):
            raise UnusableRecord("a message has the text of a special token")
        has_tools, unused = "tools" in chat.variables, set()

        def is_used(*aliases: str) -> bool:
            return any(self._chat.uses(name, tools=has_tools) for name in aliases)

        for name, value in chat.variables.items():
            if not is_used(name):
                if name in VARIABLES and value:
                    raise UnusableRecord(f"the chat template does not use {name}")
                unused.add(name)
        for name in {name for message in chat.messages for name in message} - {"role", "content"}:
            if not is_used(*(REASONING if name in REASONING else (name,))):
                if name in NEEDED and any(message.get(name) for message in chat.messages):
                    raise UnusableRecord(f"the chat template does not use {name} of messages")
                unused.add(f"messages.{name}")
        self.unused.update(unused)

    def _require_no_variables(self, record: Mapping[str, Any]) -> None:
        if variables := conversations.template_variables(record):
            raise UnusableRecord(
                f"{', '.join(variables)} cannot be used without a chat template; give messages, not texts"
            )

    def _count_unused(self, record: Mapping[str, Any], used: Sequence[str]) -> None:
        pairs = OBJECTIVES[self.options.kind].pairs
        others = ("completion",) if pairs else PAIR[1:]  # of the other objectives
        known = {*used, *others, *CONTEXT, *VARIABLES}
        self.unused.update(name for name, value in record.items() if name not in known and value is not None)

    def _leaves_out_end(self, text: str, turns: Sequence[tuple[int, int]]) -> bool:
        """Whether the loss, which covers these ranges of a text, leaves out the token that ends an answer."""
        if self._ends is None:  # unknown: then any added token may be the end
            return not all(text[start:end].rstrip().endswith(self._added_texts) for start, end in turns)
        return not self._ends or any(text[end:].lstrip().startswith(self._ends) for _, end in turns)

    @cached_property
    def _ends(self) -> tuple[str, ...] | None:
        """Texts of the tokens that end a turn of the assistant; None if they are unknown."""
        stops = self._chat.stop_tokens(self._special)
        if stops is None:
            return None
        return tuple(token for stop in stops if (token := self._special.id_to_token(stop)) is not None)

    @cached_property
    def _added_texts(self) -> tuple[str, ...]:
        tokens = self._special.get_added_tokens_decoder().values()
        return tuple(token.content for token in tokens if token.content)

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        tokens = self._special.get_added_tokens_decoder().values()
        texts = [re.escape(token.content) for token in tokens if token.special and token.content]
        return re.compile("|".join(texts) or "(?!)")


def _split(tokenizer: Tokenizer, prompt: str, answers: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Ids of a prompt and of answers in their joined text; a token across the boundary is the answer's."""
    texts = (prompt, *(prompt + answer for answer in answers))
    alone, *joined = (_encode(tokenizer, text).ids for text in texts)
    start = min(_shared_length(alone, ids) for ids in joined)
    return alone[:start], [ids[start:] for ids in joined]


def _encode(tokenizer: Tokenizer, text: str) -> Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate, by the version of tokenizers
        raise UnusableRecord("its text cannot be encoded") from error


def _marked(prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Ids of a prompt and its answer, int32; only those of the answer count."""
    ids = np.array([*prompt, *answer], np.int32)
    ids[: max(1, len(prompt))] = ~ids[: max(1, len(prompt))]
    return ids


def _shared_words(a: str, b: str) -> str:
    """The common beginning of two texts, up to the end of a line or word."""
    length = _shared_length(a, b)
    return a[: max(a.rfind("\n", 0, length), a.rfind(" ", 0, length)) + 1]


def _shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _size(*texts: str) -> int:
    return sum(len(text.encode(errors="replace")) for text in texts)
