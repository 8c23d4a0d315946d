"""Chat templates: a conversation's text as its model was trained on it, by Jinja in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import ProfileError
from profiles.sections.objective import TEMPLATES

if TYPE_CHECKING:
    from jinja2 import Template

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
MARKER = re.compile(r"<\|[^|<>{}\s]+\|>")
# Marks answers for transformers; here they are located by rendering the turns before them.
GENERATION_TAG = re.compile(r"\{%-? (?:end)?generation -?%\}")
NAMED = dict(zip(TEMPLATES, (CHATML, LLAMA3), strict=True))


class TemplateFailed(ValueError):
    """A template rejected a conversation, or does not show where its answers are."""


def read_template(template: str) -> str:
    """The source of a named template or of a file. Raises ProfileError if there is neither."""
    if template in NAMED:
        return NAMED[template]
    try:
        return Path(template).expanduser().read_text()
    except OSError:
        reason = "is neither a file nor the name of a chat template"
        raise ProfileError("objective.template", template, reason, list(NAMED)) from None


class ChatTemplate:
    """A chat template with a tokenizer's special tokens.

    Args:
        folder: of the tokenizer, with tokenizer_config.json.
        source: of the template; None: the tokenizer's own.

    Attributes:
        markers: the texts of the form <|...|> in its source.

    Raises:
        ProfileError: the tokenizer has none.
    """

    def __init__(self, folder: Path, source: str | None = None) -> None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        if source is None:
            file = folder / "chat_template.jinja"
            source = file.read_text() if file.exists() else settings.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        if source is None:
            reason = "is missing: the data has messages, and the tokenizer has no chat template"
            raise ProfileError("objective.template", None, reason, list(NAMED))
        tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self._variables = {
            name: token["content"] if isinstance(token, dict) else token or ""
            for name, token in tokens.items()
        }
        self.markers = [*dict.fromkeys(MARKER.findall(source))]
        self._template = _compiled(source)

    def render(self, messages: Sequence[Message], *, answer_next: bool = False) -> str:
        """The text of messages, with the beginning of an answer if one is next. Raises TemplateFailed."""
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=messages, add_generation_prompt=answer_next, **self._variables
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise TemplateFailed(f"the chat template rejects the messages: {error}") from error

    def with_answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """A conversation's text, and each assistant turn's range of characters. Raises TemplateFailed."""
        text, turns = self.render(messages), []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, after = self.render(messages[:i], answer_next=True), self.render(messages[: i + 1])
            if not after.startswith(before) or not text.startswith(after):
                raise TemplateFailed(
                    "the chat template changes earlier turns, so that answers cannot be located"
                )
            turns.append((len(before), len(after)))
        return text, turns


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def reject(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = reject
    try:
        return environment.from_string(GENERATION_TAG.sub("", source))
    except TemplateSyntaxError as error:
        raise ProfileError("objective.template", None, f"is not a Jinja template: {error}") from error
