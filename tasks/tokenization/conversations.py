"""Conversations of records: messages, tools, documents, and the messages that the loss covers.

Which of their tokens it covers is decided in examples.py.
A part of a record that would change what is trained on, and that cannot be used, makes the record unusable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.tokenization.chat_templates import RESERVED, Message

# Of ShareGPT, with those of chat templates.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
COVERED = ("weight", "train")  # fields of a message that say whether the loss covers it
CONTEXT = ("system", "history")  # fields of a record that come before its prompt
VARIABLES = ("tools", "documents", "chat_template_kwargs")  # fields of a record for the chat template
ANSWERED = ("prompt", "completion", "chosen", "rejected")  # fields of a record that are texts or messages
MESSAGE = {"role", "from"}  # fields of a message, one of which it has
# Fields of a record that no objective can use, and what to do.
UNSUPPORTED = {
    "functions": "give them as tools",
    **dict.fromkeys(("images", "videos", "audios", "audio"), "only text is supported"),
}


class UnusableRecord(ValueError):
    """A record that lacks what its objective trains on, or has parts that cannot be used."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template.

    Attributes:
        trained: whether the loss may cover each message.
        variables: of the template: tools, documents, and those of chat_template_kwargs.
    """

    messages: list[Message]
    trained: list[bool]
    variables: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self) -> Conversation:
        """The same messages, none of them covered by the loss."""
        return Conversation(self.messages, [False] * len(self.messages), self.variables)

    def __add__(self, other: Conversation) -> Conversation:
        variables = {**self.variables, **other.variables}
        return Conversation([*self.messages, *other.messages], [*self.trained, *other.trained], variables)

    def up_to_last_answer(self) -> Conversation:
        """The messages up to the last trained one; the loss covers only that one."""
        last = max(i for i, trained in enumerate(self.trained) if trained)
        return Conversation(self.messages[: last + 1], [i == last for i in range(last + 1)], self.variables)

    def texts(self) -> Iterator[str]:
        return _strings([self.messages, self.variables])


def with_messages(record: Mapping[str, Any], chats: Sequence[str]) -> Mapping[str, Any]:
    """A record with the messages that its texts hold as JSON, which is all that a CSV file can have.

    A single text of a prompt or an answer stays a text: it may be JSON that the model is to write. So does a prompt beside two
    answers that are messages.

    Args:
        chats: fields of conversations.
    """
    parsed = {name: found for name, value in record.items() if (found := _parsed(value)) is not None}
    texts = {name for name in ANSWERED if record.get(name)}
    if {"chosen", "rejected"} <= parsed.keys():  # two conversations, beside which a prompt may be a text
        texts &= parsed.keys()
    used = parsed.keys() & {*chats, *(texts if texts <= parsed.keys() else ())}
    return {**record, **{name: parsed[name] for name in used}} if used else record


def _parsed(value: Any) -> list[Any] | None:
    """The messages of a JSON text; None if it is none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    are_messages = all(isinstance(each, Mapping) and MESSAGE & each.keys() for each in found)
    return found if found and are_messages else None


def messages(value: Any, role: str = "user") -> Conversation:
    """Messages of a record's field, or a text as one of a `role`. Raises UnusableRecord."""
    if isinstance(value, str):
        found: list[Message] = [{"role": role, "content": value}] if value else []
        return Conversation(found, [role == "assistant"] * len(found))
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise UnusableRecord(
            f"type {type(value).__name__} is neither a text nor a list of messages with role and content"
        )
    pairs = [_message(message) for message in value]
    return Conversation([message for message, _ in pairs], [trained for _, trained in pairs])


def _message(given: Message) -> tuple[Message, bool]:
    """A message in the names of chat templates, with all fields, and whether the loss covers it."""
    message = {name: value for name, value in given.items() if value is not None and name not in COVERED}
    for name, other in (("role", "from"), ("content", "value")):
        if name not in message and other in message:
            message[name] = message.pop(other)
    role, content = message.get("role"), message.get("content")
    calls = message.get("tool_calls") or message.get("function_call")
    if not isinstance(role, str) or (not isinstance(content, str) and not (content is None and calls)):
        raise UnusableRecord(f"a message needs a role and a text as content; its fields: {names(given)}")
    if role == "function_call":
        raise UnusableRecord(
            "a message has the role function_call; give its call as tool_calls of the assistant"
        )
    message["role"] = role = ROLES.get(role, role)
    return message, _is_covered(given, role)


def _is_covered(message: Message, role: str) -> bool:
    given = {name: message[name] for name in COVERED if message.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):
            raise UnusableRecord(f"a message has {name} {value!r}; use 0 or 1")
        if value and role != "assistant":
            raise UnusableRecord(
                f"a message of the role {role} has {name} {value}; only the assistant's are trained on"
            )
    return role == "assistant" and all(given.values())


def is_text(record: Mapping[str, Any], fields: Sequence[str]) -> bool:
    """Whether the prompt in these fields of a record is text, not messages."""
    return all(isinstance(record[name], str) for name in fields if record.get(name))


def prompt_text(record: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The texts of a record's CONTEXT and of these fields, separated by empty lines."""
    before = (message["content"] for message in context(record).messages)
    return "\n\n".join([*before, *(record[name] for name in fields if record.get(name))])


def prompt(record: Mapping[str, Any], fields: Sequence[str]) -> Conversation:
    """The messages of a record's CONTEXT and of these fields, none of which the loss covers."""
    parts = [record[name] for name in fields if record.get(name)]
    if is_text(record, fields):
        parts = ["\n\n".join(parts)]
    elif len(parts) > 1:
        raise UnusableRecord(f"{' and '.join(fields)} are not both text")
    return in_context(record, messages(parts[0])).prompt()


def context(record: Mapping[str, Any]) -> Conversation:
    """The messages in a record's fields `system` and `history`, pairs of a question and its answer."""
    system, history = record.get("system") or "", record.get("history") or []
    if not isinstance(system, str):
        raise UnusableRecord(f"system is of type {type(system).__name__}, not a text")
    if not isinstance(history, Sequence) or not all(_is_exchange(each) for each in history):
        raise UnusableRecord("history is not a list of pairs of texts, a question and its answer")
    turns = [
        messages(text, role)
        for each in history
        for text, role in zip(each, ("user", "assistant"), strict=True)
    ]
    return sum(turns, messages(system, "system")).prompt()


def in_context(record: Mapping[str, Any], conversation: Conversation) -> Conversation:
    """A conversation after its record's CONTEXT, with the record's VARIABLES."""
    before, variables = context(record), template_variables(record)
    both = [*conversation.messages[:1], *before.messages[:1]]
    if len(both) > 1 and all(message["role"] == "system" for message in both):
        if both[0] != both[1]:
            raise UnusableRecord("it has a field system and another message of the role system")
        conversation = Conversation(conversation.messages[1:], conversation.trained[1:])
    return Conversation([], [], variables) + before + conversation


def template_variables(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record gives to the chat template beside messages; lists may be JSON. Raises UnusableRecord."""
    for name, advice in UNSUPPORTED.items():
        if record.get(name):
            raise UnusableRecord(f"{name} cannot be used; {advice}")
    found = {name: record[name] for name in VARIABLES if record.get(name) not in (None, "")}
    for name, value in found.items():
        if isinstance(value, str):
            try:
                found[name] = value = json.loads(value)
            except ValueError as error:
                raise UnusableRecord(f"{name} is not JSON: {error}") from error
        each = [value] if name == "chat_template_kwargs" else value
        if not isinstance(each, list) or not all(isinstance(one, Mapping) for one in each):
            wanted = "an object" if name == "chat_template_kwargs" else "a list of objects"
            raise UnusableRecord(f"{name} is not {wanted}")
    options = found.pop("chat_template_kwargs", {})
    if taken := RESERVED & options.keys():
        raise UnusableRecord(
            f"chat_template_kwargs sets {', '.join(sorted(taken))}, which the record's messages determine"
        )
    return {**options, **found}


def names(record: Mapping[str, Any]) -> str:
    """The names of a record's fields, for messages."""
    return ", ".join(map(str, record)) or "none"


def _is_exchange(value: Any) -> bool:
    is_pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    return is_pair and all(isinstance(text, str) for text in value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _strings(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _strings(each)
