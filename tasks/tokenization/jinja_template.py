"""JinjaTemplate: a chat template compiled as in transformers, which records its generated text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from profiles.errors import ProfileError


class _Generation(Extension):
    """The block {% generation %}: records the ranges of the text it renders, on request."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: ImmutableSandboxedEnvironment) -> None:
        super().__init__(environment)
        self.rendered: list[str] = []  # the text before the block, in parts
        self.marks: list[tuple[int, int]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Callable[[], str]) -> str:
        text, start = caller(), sum(map(len, self.rendered))
        self.marks.append((start, start + len(text)))
        return text


class JinjaTemplate:
    """A compiled template in its own environment, with the functions transformers gives to templates.

    Attributes:
        source: its text.
        marks_answers: whether it has {% generation %} blocks.

    Raises:
        ProfileError: it is not a Jinja template.
    """

    def __init__(self, source: str) -> None:
        def reject(message: str) -> None:
            raise TemplateError(message)

        def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        # One time for all renderings, which are compared with each other.
        now = datetime.now()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {"raise_exception": reject, "strftime_now": now.strftime}
        self.source = source
        self._generation = next(
            each for each in environment.extensions.values() if isinstance(each, _Generation)
        )
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ProfileError("objective.template", None, f"is not a Jinja template: {error}") from error
        self.marks_answers = any(
            isinstance(block.call.node, nodes.ExtensionAttribute) for block in tree.find_all(nodes.CallBlock)
        )

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the ranges of its generated parts."""
        generation = self._generation
        generation.rendered, generation.marks = [], []
        for part in self._template.generate(variables):
            generation.rendered.append(part)
        return "".join(generation.rendered), generation.marks
