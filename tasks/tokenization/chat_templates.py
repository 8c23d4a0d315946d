"""Chat templates: rendered as transformers' `apply_chat_template` does, with the answers' ranges."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.sections.objective import TEMPLATES
from tasks.tokenization.tokenizer_files import SPECIAL, TEMPLATE

if TYPE_CHECKING:
    from tasks.tokenization.jinja_template import JinjaTemplate

Message = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NAMED = dict(zip(TEMPLATES, (CHATML, LLAMA3), strict=True))
MARKER = re.compile(r"<[|｜][^|｜<>{}\s]+[|｜]>")
# Names of a message's reasoning, the standard one first.
REASONING = ("reasoning_content", "thinking", "reasoning")
RESERVED = {"messages", "add_generation_prompt"}  # variables that no record may set
QUESTION, ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": {}}}
CHANGES_TURNS = (
    "the chat template changes earlier turns when later ones follow, so that answers cannot be located; train on the last turn "
    "alone (objective.turns: last), or use a template with {% generation %} marks"
)
OTHER_PROMPT = (
    "the chat template's prompt for an answer is not how it renders answers, so that they cannot be located; use a template with "
    "{% generation %} marks"
)
OTHER_ENDING = (
    "the chat template ends every conversation with the header of an answer, and no turn with a special token, so that answers "
    "cannot be located; use a template with {% generation %} marks"
)


class TemplateFailed(ValueError):
    """A template rejected a conversation, or does not show where its answers are."""


def read_template(template: str) -> str:
    """The source of a named template or of a file. Raises ProfileError if there is neither."""
    if template in NAMED:
        return NAMED[template]
    try:
        return _as_text(state_files.contents(Path(template).expanduser()))
    except OSError as error:
        if state_files.is_temporary(error):
            raise
        reason = "is neither a file nor the name of a chat template"
        raise ProfileError("objective.template", template, reason, list(NAMED)) from None


class ChatTemplate:
    """A chat template with a tokenizer's special tokens.

    Args:
        folder: of the tokenizer, with tokenizer_config.json.
        source: of the template; None: the tokenizer's own.

    Attributes:
        source: of the template for conversations without tools.
        markers: the texts of the form <|...|> in its source.

    Raises:
        ProfileError: the tokenizer has none.
    """

    def __init__(self, folder: Path, source: str | None = None) -> None:
        # Here, because processes that tokenize plain text start faster without jinja2.
        from tasks.tokenization.jinja_template import JinjaTemplate

        settings = json.loads(state_files.contents(folder / "tokenizer_config.json"))
        sources = {"default": source} if source is not None else own_templates(folder)
        if "default" not in sources:
            reason = "is missing: the data has messages, and the tokenizer has no chat template"
            raise ProfileError("objective.template", None, reason, list(NAMED))
        named = settings.get("extra_special_tokens")  # of the model, by name, or a list
        tokens = {
            **(named if isinstance(named, dict) else {}),
            **{name: settings.get(name) for name in SPECIAL},
        }
        tokens = {
            name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
        }
        self._variables = {name: token for name, token in tokens.items() if isinstance(token, str)}
        self.source = sources["default"]
        self.markers = [*dict.fromkeys(MARKER.findall(self.source))]
        # By whether a record has tools: transformers then prefers the template of that name.
        self._templates = {
            tools: JinjaTemplate(sources.get("tool_use", self.source) if tools else self.source)
            for tools in (False, True)
        }

    def uses(self, name: str, *, tools: bool = False) -> bool:
        """Whether the template's source contains a name, such as that of a message's field."""
        return re.search(rf"\b{re.escape(name)}\b", self._templates[tools].source) is not None

    def render(self, messages: Sequence[Message], *, answer_next: bool = False, **variables: Any) -> str:
        """The text of messages, with the beginning of an answer if one is next. Raises TemplateFailed.

        Args:
            variables: tools, documents, and others of a record's chat_template_kwargs.
        """
        return self._render(messages, answer_next, variables)[0]

    def with_answers(
        self, messages: Sequence[Message], trained: Sequence[bool] | None = None, **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """A conversation's text, and each trained assistant turn's range of characters. Raises TemplateFailed.

        Args:
            trained: whether the loss covers each message, if it is the assistant's; None: all.
            variables: as in `render`.
        """
        text, marks = self._render(messages, False, variables)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        wanted = [i for i in turns if trained is None or trained[i]]
        if self._template(variables).marks_answers:
            if not marks:
                raise TemplateFailed("the chat template marks none of the answers' text as generated")
            if len(wanted) < len(turns):
                if len(marks) != len(turns):
                    reason = f"the chat template marks {len(marks)} texts as generated in {len(turns)} turns of the assistant"
                    raise TemplateFailed(f"{reason}, so that those to train on cannot be located")
                marks = [mark for i, mark in zip(turns, marks, strict=True) if i in wanted]
            return text, marks
        ranges = []
        for i in wanted:
            before = self.render(messages[:i], answer_next=True, **variables)
            after = self._without_next_header(messages[: i + 1], before, variables)
            if not after.startswith(before):
                raise TemplateFailed(OTHER_PROMPT)
            if not text.startswith(after):
                after = self._without_final_eos(after)
            if not text.startswith(after):
                raise TemplateFailed(CHANGES_TURNS)
            ranges.append((len(before), len(after)))
        return text, ranges

    def answered(
        self, messages: Sequence[Message], answers: Sequence[Message], **variables: Any
    ) -> tuple[str, str]:
        """The text of a prompt's messages, and of answers to them alone. Raises TemplateFailed."""
        before = self.render(messages, answer_next=True, **variables)
        after = self._without_next_header([*messages, *answers], before, variables)
        if not after.startswith(before):
            raise TemplateFailed(OTHER_PROMPT)
        return before, after[len(before) :]

    def stop_tokens(self, tokenizer: Tokenizer) -> list[int] | None:
        """Ids of the tokens that end an assistant's turn: after an answer and after a tool call, if any.

        None if that is unknown, because the template rejects the conversations that would show it.
        """
        found: dict[int, None] = {}  # an ordered set
        known = False
        ids = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
        for answer in (ANSWER, {"role": "assistant", "content": "", "tool_calls": [CALL]}):
            if "tool_calls" in answer and not self.uses("tool_calls"):
                continue
            try:
                before = self.render([QUESTION], answer_next=True)
                text = self._without_next_header([QUESTION, answer], before, {}).rstrip()
            except TemplateFailed:  # it has no calls, or wants other messages
                continue
            known = True
            # The text of a call also ends with the marker of its end, after which another call may follow.
            shortened = text if "tool_calls" in answer else self._without_final_eos(text).rstrip()
            for end in (shortened, text):
                ending = max((token for token in ids if token and end.endswith(token)), key=len, default=None)
                if ending is not None:
                    found[ids[ending]] = None
        return [*found] if known else None

    def _without_next_header(
        self, messages: Sequence[Message], before: str, variables: Mapping[str, Any]
    ) -> str:
        """The text of messages up to an answer's end, without the header of a next one.

        Templates that ignore add_generation_prompt, such as Llama 3's first one, end every conversation with that header.

        Args:
            before: text before the answer, which ends with the same header.
        """
        text = self.render(messages, **variables)
        if text != self.render(messages, answer_next=True, **variables):
            return text
        answer = text[len(before) :]
        for ending in re.finditer("|".join(map(re.escape, self._endings)) or "(?!)", answer):
            if before.endswith(header := answer[ending.end() :]):
                return text.removesuffix(header)
        if not self.render([*messages, QUESTION], **variables).startswith(text):
            raise TemplateFailed(OTHER_ENDING)
        return text

    def _without_final_eos(self, text: str) -> str:
        """A conversation's text without an EOS after the end of its last turn, as Phi-3's template adds."""
        rest = text.removesuffix(self._variables.get("eos_token", ""))
        return rest if rest.rstrip().endswith(tuple(self._endings)) else text

    @property
    def _endings(self) -> list[str]:
        """Texts that may end a turn, longest first."""
        return sorted({*self.markers, *filter(None, self._variables.values())}, key=len, reverse=True)

    def _template(self, variables: Mapping[str, Any]) -> JinjaTemplate:
        return self._templates[variables.get("tools") is not None]

    def _render(
        self, messages: Sequence[Message], answer_next: bool, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        given = {"tools": None, "documents": None, **self._variables, **variables}
        try:
            return self._template(variables).render(
                {
                    **given,
                    "messages": [*map(_as_in_transformers, messages)],
                    "add_generation_prompt": answer_next,
                }
            )
        except Exception as error:  # a template can raise what Python's operators and methods raise
            raise TemplateFailed(f"the chat template rejects the messages: {error}") from error


def own_templates(folder: Path) -> dict[str, str]:
    """The chat templates of a tokenizer's folder by name; without names, the only one is the default."""
    if (own := state_files.read(folder / TEMPLATE)) is not None:
        return {"default": _as_text(own)}
    found = json.loads(state_files.contents(folder / "tokenizer_config.json")).get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {"default": found} if isinstance(found, str) else {}


def _as_text(data: bytes) -> str:
    """Contents of a file as text, with `\\n` at the end of each line."""
    return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig").read()


def _as_in_transformers(message: Message) -> dict[str, Any]:
    """A message without fields that are None, its reasoning under each name that templates use."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in REASONING if name in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}
