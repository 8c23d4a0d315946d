"""Chat templates of every supported family: rendering, answers' ranges, end-of-turn tokens."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from profiles.errors import ProfileError
from tasks.tokenization import chat_templates, tokenizer_files
from tasks.tokenization.chat_templates import MARKER, ChatTemplate, TemplateFailed
from tests.tasks.tokenization.tokenizers import of_bytes

FIXTURES = {path.stem: path.read_text() for path in Path("tests/fixtures/chat_templates").iterdir()}
FIXTURES |= chat_templates.NAMED
USER = [{"role": "user", "content": text} for text in ("how many stones", "and what is behind them")]
ANSWERS = [{"role": "assistant", "content": text} for text in ("forty", "the mill")]
SYSTEM = {"role": "system", "content": "be short"}
ONE, TWO = [USER[0], ANSWERS[0]], [USER[0], ANSWERS[0], USER[1], ANSWERS[1]]
TOOL = {
    "type": "function",
    "function": {"name": "count", "description": "counts", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "function": {"name": "count", "arguments": {"what": "stönes"}}}
CALLED = [
    USER[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "40"},
]
# What ends a turn of the assistant, as text and as tokens; what it begins with beside the answer.
ENDINGS = {
    "chatml": ("<|im_end|>\n", ["<|im_end|>"]),
    "llama3": ("<|eot_id|>", ["<|eot_id|>"]),
    "llama3.1": ("<|eot_id|>", ["<|eot_id|>"]),
    "mistral": ("</s>", ["</s>"]),
    "mistral-small": ("</s>", ["</s>"]),
    "mixtral": ("</s>", ["</s>"]),
    "qwen3": ("<|im_end|>\n", ["<|im_end|>"]),
    "olmo2": ("</s>", ["</s>"]),
    "dbrx": ("<|im_end|>", ["<|im_end|>"]),
    "gpt_oss": ("<|return|>", ["<|return|>", "<|call|>"]),
    "deepseek_v3": ("<｜end▁of▁sentence｜>", ["<｜end▁of▁sentence｜>"]),
    "marked": ("<|im_end|>", ["<|im_end|>"]),
    "smollm3": ("<|im_end|>\n", ["<|im_end|>"]),
    "gemma3": ("<end_of_turn>\n", ["<end_of_turn>"]),
    "granite": ("<|end_of_text|>\n", ["<|end_of_text|>"]),
    "stablelm": ("</s>\n", ["</s>"]),
    "phi3": ("<|end|>\n", ["<|end|>", "</s>"]),
    "glm4": ("", []),
}
FINAL = {"phi3": "</s>"}  # what follows the last turn
BEGINNINGS = {
    **dict.fromkeys(("mistral", "mixtral"), " "),
    "qwen3": "<think>\n\n</think>\n\n",
    "gpt_oss": "<|channel|>final<|message|>",
    "smollm3": "<|im_start|>assistant\n",  # which it marks too
    "glm4": "\n",
}
CHANGING = ("qwen3", "gpt_oss")  # earlier turns


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes with the markers of all templates."""
    folder = tmp_path_factory.mktemp("tokenizer")
    markers = sorted(
        {*re.findall(MARKER, "".join(FIXTURES.values())), "<s>", "</s>", "<think>", "<end_of_turn>"}
    )
    tokenizer_files.write(folder, of_bytes(markers), {"bos_token": "<s>", "eos_token": "</s>"})
    return folder


@pytest.mark.parametrize("name", FIXTURES)
def test_conversations_are_rendered_as_by_transformers(folder, name):
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate(folder, FIXTURES[name])
    reasoned = [USER[0], {**ANSWERS[0], "reasoning": "four rows of ten", "name": None}]
    chats = [ONE, TWO, [SYSTEM, *ONE], TWO[:3], [*CALLED, ANSWERS[0]], CALLED[:2], reasoned]
    variables = [
        {},
        {"tools": [TOOL]},
        {"enable_thinking": False},
        {"documents": [{"title": "a", "text": "b"}]},
    ]
    rendered = 0
    for chat, given, answer_next in product(chats, variables, (False, True)):
        try:
            expected = theirs.apply_chat_template(
                chat, chat_template=FIXTURES[name], tokenize=False, add_generation_prompt=answer_next, **given
            )
        except Exception:
            with pytest.raises(TemplateFailed, match="rejects the messages"):
                ours.render(chat, answer_next=answer_next, **given)
            continue
        assert ours.render(chat, answer_next=answer_next, **given) == expected
        rendered += 1
    assert rendered >= 24


@pytest.mark.parametrize("name", FIXTURES)
def test_answers_are_located_without_what_surrounds_them(folder, name):
    ours, (ending, _) = ChatTemplate(folder, FIXTURES[name]), ENDINGS[name]

    def located(chat, *options):
        text, turns = ours.with_answers(chat, *options)
        return [text[start:end] for start, end in turns]

    first, second = (f"{BEGINNINGS.get(name, '')}{answer['content']}{ending}" for answer in ANSWERS)
    last = second + FINAL.get(name, "")
    assert located(ONE) == [first + FINAL.get(name, "")]
    assert located(TWO, [False, False, True, True]) == [last]
    if name in CHANGING:
        with pytest.raises(
            TemplateFailed, match=r"changes earlier turns.*objective\.turns: last.*generation %\} marks"
        ):
            located(TWO)
    else:
        assert located(TWO) == [first, last]
        assert located(TWO, [True, True, True, False]) == [first]
    prompt, answer = ours.answered(TWO[:3], TWO[3:])
    assert prompt == ours.render(TWO[:3], answer_next=True)
    assert last.rstrip().endswith(answer.rstrip())
    assert answer.lstrip().startswith("<" if name in CHANGING else "the mill")


@pytest.mark.parametrize("name", FIXTURES)
def test_tokens_that_end_turns_are_found(folder, name):
    tokenizer = tokenizer_files.load(folder)
    found = ChatTemplate(folder, FIXTURES[name]).stop_tokens(tokenizer)
    assert [tokenizer.id_to_token(token) for token in found] == ENDINGS[name][1]


def test_the_end_of_a_tool_call_does_not_end_a_turn(folder):
    turn = "<|im_start|>{{ turn.role }} {{ turn.content }}{% if turn.tool_calls %}<|call|>{% endif %}{{ eos_token }}"
    source = "{% for turn in messages %}" + turn + "{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    tokenizer = tokenizer_files.load(folder)
    found = ChatTemplate(folder, source).stop_tokens(tokenizer)
    assert [tokenizer.id_to_token(token) for token in found] == ["</s>"]


@pytest.mark.parametrize("end", ["\n", "\n\n"])
def test_a_header_after_turns_that_no_token_ends_is_not_taken_for_an_answers_end(folder, end):
    turns = "{% for turn in messages %}## {{ turn.role }}: {{ turn.content }}" + end + "{% endfor %}"
    for source in (turns, turns + "{% if add_generation_prompt %}## assistant: {% endif %}"):
        text, (located,) = ChatTemplate(folder, source).with_answers(ONE)
        assert text[slice(*located)].endswith(f"forty{end}")
    with pytest.raises(
        TemplateFailed, match="ends every conversation with the header of an answer, and no turn"
    ):
        ChatTemplate(folder, turns + "## assistant: ").with_answers(ONE)


def test_marks_locate_what_transformers_counts(folder):
    theirs, source = AutoTokenizer.from_pretrained(folder), FIXTURES["marked"]
    chats = [TWO, [*CALLED, {**ANSWERS[0], "reasoning_content": "four rows of ten"}]]
    for chat in chats:
        made = theirs.apply_chat_template(
            chat, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
        text, turns = ChatTemplate(folder, source).with_answers(chat)
        offsets = tokenizer_files.load(folder).encode(text, add_special_tokens=False).offsets
        counted = [any(start <= low < end for start, end in turns) for low, _ in offsets]
        assert counted == [*map(bool, made["assistant_masks"])]
        assert sum(counted) > 10
    partly = ChatTemplate(
        folder, source.replace("turn.role == 'assistant'", "turn.role == 'assistant' and loop.last")
    )
    with pytest.raises(TemplateFailed, match="marks 1 texts as generated in 2 turns"):
        partly.with_answers(TWO, [True, False, True, True])


def test_a_prompt_that_no_answer_begins_with_is_named(folder):
    thinking = chat_templates.CHATML.replace("assistant\n{%", "assistant\n<think>{%")
    with pytest.raises(TemplateFailed, match="prompt for an answer is not how it renders answers"):
        ChatTemplate(folder, thinking).with_answers(ONE)


def test_templates_know_the_special_tokens_that_a_tokenizer_names(tmp_path):
    named = {"call_token": "<call>", "end_token": {"content": "</s>"}}
    names = {"bos_token": "<s>", "extra_special_tokens": named}
    tokenizer_files.write(tmp_path, of_bytes(["<s>", "</s>", "<call>"]), names)
    source = "{{ bos_token }}{{ call_token }}{{ end_token }}{{ eos_token }}"
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        ONE, chat_template=source, tokenize=False
    )
    assert ChatTemplate(tmp_path, source).render(ONE) == expected == "<s><call></s>"


def test_records_with_tools_are_rendered_by_the_template_of_that_name(folder, tmp_path):
    templates = [{"name": name, "template": f"{name}: {{{{ tools }}}}"} for name in ("default", "tool_use")]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": templates}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for given in ({}, {"tools": [TOOL]}):
        expected = theirs.apply_chat_template(ONE, tokenize=False, **given)
        assert ChatTemplate(tmp_path).render(ONE, **given) == expected
    with pytest.raises(ProfileError, match=r"objective\.template: is missing.*: chatml, llama3"):
        ChatTemplate(folder)
