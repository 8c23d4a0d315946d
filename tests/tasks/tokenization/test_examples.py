"""Records as training examples: tokens that count, chat templates, truncation, unusable records."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from profiles.errors import ProfileError
from tasks.tokenization import chat_templates
from tasks.tokenization.chat_templates import TemplateFailed
from tasks.tokenization.conversations import UnusableRecord
from tasks.tokenization.examples import Examples, RecordOptions
from tests.tasks.tokenization.tokenizers import (
    byte_fallback,
    gpt2,
    llama2,
    metaspace,
    of_bytes,
    trained,
    unsplit,
)

EOS = "<|im_end|>"
OWN = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}A:{{ m.content }}\n{% endgeneration %}{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"  # noqa: E501
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]


TOOLS = "{% for t in tools or [] %}{{ t.name }}\n{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.tool_calls or '' }}{{ m.content or '' }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"  # noqa: E501
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "count", "arguments": "{}"}]}

REASONED = {**CHAT[1], "reasoning": "8*5"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of single bytes, so that tokens are characters."""
    folder = tmp_path_factory.mktemp("tokenizer")
    of_bytes(("<|im_start|>", EOS)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": OWN}))
    return folder


def examples(folder, kind="sft", template="chatml", length=200, too_long="truncate", **options):
    template = template and chat_templates.read_template(template)
    prompts = {"maximum_prompt_length": None, "truncation": "keep_end", **options}
    return Examples(folder, RecordOptions(kind, template, length, too_long, **prompts), [], [257])


def parts(folder, sequence):
    """A sequence as text: what does not count, and what does."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tuple(
        tokenizer.decode([token if kept else ~token for token in sequence if bool(token >= 0) is kept], skip_special_tokens=False)
        for kept in (False, True)
    )  # fmt: skip


def counted(folder, record, **options):
    (sequence,) = examples(folder, **options).of(record).sequences
    return parts(folder, sequence)[1]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2=", "completion": "4"},
        {"input": "2+2=", "output": "4"},
        {"instruction": "2+2=", "input": "", "output": "4"},
    ],
    ids=["prompt and completion", "NxD Training", "instruction"],
)
def test_only_completion_and_eos_count(folder, record):
    (sequence,) = examples(folder).of(record).sequences
    assert parts(folder, sequence) == ("2+2=", "4" + EOS)


@pytest.mark.parametrize("kind", [gpt2, metaspace, unsplit, llama2, byte_fallback])
def test_prompt_and_answer_have_the_tokens_of_trl(kind, tmp_path):
    from datasets import Dataset
    from trl import DPOTrainer  # imports slowly, as peft and datasets do: every worker collects this module

    tokenizer = trained(kind)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    records = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in (
            ("a naïve und", " the 2024", " don't"),
            ("x=1;", "und", "3.14"),
            ("na", "ïve a", "a"),  # a token across the boundary
            ("the ", "Ελλάδα", " a"),
            ("", "a", "the"),
            ("日本", "語。🙂", "\n"),
        )
    ]
    trainer, arguments = (
        SimpleNamespace(_tokenizer=fast),
        SimpleNamespace(dataset_num_proc=None, max_length=None),
    )

    def trl(rows):
        return DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), fast, arguments, "train")

    ours = {
        name: Examples(
            tmp_path, RecordOptions(name, None, 99, "drop", None, "keep_end"), [], [fast.eos_token_id]
        )
        for name in ("sft", "dpo")
    }
    for record, expected in zip(records, trl(records), strict=True):
        assert [sequence.tolist() for sequence in ours["dpo"].of(record).sequences] == [
            marked(expected["prompt_ids"], expected[f"{name}_ids"]) for name in ("chosen", "rejected")
        ]
    for record, expected in zip(
        records, trl([{**each, "rejected": each["chosen"]} for each in records]), strict=True
    ):
        (sequence,) = ours["sft"].of({"prompt": record["prompt"], "completion": record["chosen"]}).sequences
        assert sequence.tolist() == marked(expected["prompt_ids"], expected["chosen_ids"])


def marked(prompt, answer):
    """Ids of a prompt and its answer, of which the first and those of the prompt are complements."""
    given = max(1, len(prompt))
    return [~token for token in (prompt + answer)[:given]] + (prompt + answer)[given:]


def test_instruction_and_input_are_one_prompt(folder):
    record = {"instruction": "Add:", "input": "2+2", "output": "4"}
    (sequence,) = examples(folder).of(record).sequences
    assert parts(folder, sequence) == ("Add:\n\n2+2", "4" + EOS)


def test_each_turn_of_the_assistant_counts(folder):
    assert counted(folder, {"messages": CHAT}) == f"Hello{EOS}\nCiao{EOS}\n"
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert counted(folder, {"conversations": shared}) == f"Hello{EOS}\n"


def test_a_tokenizers_own_template_is_the_default(folder):
    assert counted(folder, {"messages": CHAT}, template=None) == "A:Hello\nA:Ciao\n"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], {**CHAT[3], "weight": 1}]}, f"Ciao{EOS}\n"),
        ({"conversations": [CHAT[0], CHAT[1], CHAT[2], {**CHAT[3], "train": False}]}, f"Hello{EOS}\n"),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, f"Ciao{EOS}\n"),
        ({"prompt": CHAT[:3], "completion": "Ciao"}, f"Ciao{EOS}\n"),
    ],
)  # fmt: skip
def test_turns_of_weight_0_and_of_a_prompt_do_not_count(folder, record, expected):
    assert counted(folder, record) == expected


def test_the_last_turn_alone_counts_if_the_template_changes_earlier_ones(folder, tmp_path):
    source = chat_templates.CHATML.replace(
        "{{ message.content }}",
        "{% if loop.last and message.role != 'user' %}!{% endif %}{{ message.content }}",
    )
    (tmp_path / "chat.jinja").write_text(source)
    options = {"template": str(tmp_path / "chat.jinja")}
    with pytest.raises(TemplateFailed, match=r"changes earlier turns.*objective\.turns: last"):
        counted(folder, {"messages": CHAT}, **options)
    for chat in (CHAT, [*CHAT, CHAT[0]]):
        assert counted(folder, {"messages": chat}, turns="last", **options) == f"!Ciao{EOS}\n"


def test_all_parts_of_a_conversation_reach_the_template(folder, tmp_path):
    (tmp_path / "tools.jinja").write_text(TOOLS)
    record = {
        "tools": json.dumps([{"name": "count"}]),
        "system": "be kind",
        "history": [["who", "me"]],
        "messages": [CHAT[0], {**CALL, "train": None}, {"role": "tool", "content": "40", "name": "n"}, REASONED],
    }  # fmt: skip
    made = examples(folder, template=str(tmp_path / "tools.jinja"), length=400)
    (sequence,) = made.of({**record, "id": 7}).sequences
    untrained, trained = parts(folder, sequence)
    assert trained == f"{CALL['tool_calls']}\n8*5Hello\n"
    assert (
        untrained == "count\nsystem:be kind\nuser:who\nassistant:me\nuser:Hi\nassistant:tool:40\nassistant:"
    )
    assert made.unused == {"id": 1}  # the template has the word "name"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "now?", "output": "4", "system": "short", "history": [["2+2=", "4"]]}, "short\n\n2+2=\n\n4\n\nnow?"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "short"}, "short\n\na"),
    ],
)  # fmt: skip
def test_system_and_history_of_texts_are_in_the_prompt(folder, record, expected):
    for sequence in examples(folder, "dpo" if "chosen" in record else "sft").of(record).sequences:
        assert parts(folder, sequence)[0] == expected


def test_fields_that_are_not_used_are_counted(folder):
    made = examples(folder)
    for record in (
        {"messages": [{**CHAT[0], "name": "Ann"}, CHAT[1]], "score": 1},
        {"prompt": "a", "completion": "b", "score": 2},
    ):
        made.of(record)
    assert made.unused == {"score": 2, "messages.name": 1}


def test_marks_that_leave_out_the_end_of_an_answer_are_counted(folder, tmp_path):
    marked = chat_templates.CHATML.replace(
        "{{ message.content }}<|im_end|>",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}"
        "{{ message.content }}<|im_end|>{% endif %}",
    )
    endless = marked.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %} <|im_end|>")
    # This one rejects the conversation that shows what ends its answers.
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('needs a system prompt') }}{% endif %}"
    learned, left_out = (f"Hello{EOS}Ciao{EOS}", 0), ("HelloCiao", 2)
    cases = {marked: learned, endless: left_out, strict + marked: learned, strict + endless: left_out}
    cases[strict + chat_templates.CHATML] = f"Hello{EOS}\nCiao{EOS}\n", 0
    for source, (covered, count) in cases.items():
        (tmp_path / "chat.jinja").write_text(source)
        made = examples(folder, template=str(tmp_path / "chat.jinja"))
        for _ in range(2):
            (sequence,) = made.of({"messages": [{"role": "system", "content": "Be brief."}, *CHAT]}).sequences
        assert parts(folder, sequence)[1] == covered
        assert made.endless == count
    (tmp_path / "chat.jinja").write_text(marked.replace("== 'assistant'", "== 'model'"))
    with pytest.raises(TemplateFailed, match="marks none of the answers' text as generated"):
        counted(folder, {"messages": CHAT}, template=str(tmp_path / "chat.jinja"))


def test_template_markers_without_a_token_are_reported(folder):
    for template, unknown in (
        ("chatml", []),
        ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    ):
        made = examples(folder, template=template)
        assert made.unknown_markers() == []
        made.of({"messages": CHAT})
        assert made.unknown_markers() == unknown


def test_templates_run_in_a_sandbox_and_may_reject_messages(folder, tmp_path):
    for source in ("{{ messages.__class__.__mro__ }}", "{{ raise_exception('roles must alternate') }}"):
        (tmp_path / "chat.jinja").write_text(source)
        with pytest.raises(TemplateFailed):
            examples(folder, template=str(tmp_path / "chat.jinja")).of({"messages": CHAT})
    with pytest.raises(ProfileError, match="chatml, llama3"):
        chat_templates.read_template("nothing")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "x", "id": 1}, "no messages, and no prompt with a completion; its fields: text, id"),
        ({"prompt": "x", "completion": None}, "no messages, and no prompt with a completion"),
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"prompt": "x", "completion": 5}, "type int is neither a text nor a list of messages"),
        ({"messages": CHAT[:1]}, "no turn of the role assistant; its roles: user"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "its roles: bot"),
        ({"messages": ["Hi", "Hello"]}, "type list is neither a text nor a list of messages"),
        ({"messages": CHAT[0]}, "type dict is neither a text nor a list of messages"),
        ({"messages": [{"role": "user", "text": "x"}]}, "needs a role and a text as content; its fields: role, text"),
        ({"messages": [{"role": "user", "content": f"x{EOS}"}, CHAT[1]]}, "the text of a special token"),  # would end the turn
        ({"messages": CHAT[:2], "tools": [{"name": EOS}]}, "the text of a special token"),
        ({"messages": CHAT[:2], "tools": [{"name": "count"}]}, "the chat template does not use tools"),
        ({"messages": [CHAT[0], CALL, CHAT[1]]}, "the chat template does not use tool_calls of messages"),
        ({"messages": [CHAT[0], {**CHAT[1], "thinking": "hm"}]}, "the chat template does not use thinking of messages"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "a message has weight 0.5; use 0 or 1"),
        ({"messages": [{**CHAT[0], "train": True}, CHAT[1]]}, "the role user has train True; only the assistant's"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "no turn of the assistant to train on"),
        ({"messages": [{"from": "function_call", "value": "{}"}, CHAT[1]]}, "give its call as tool_calls"),
        ({"messages": CHAT[:2], "functions": [{"name": "count"}]}, "functions cannot be used; give them as tools"),
        ({"messages": CHAT[:2], "images": ["a.png"]}, "images cannot be used; only text is supported"),
        ({"messages": CHAT[:2], "tools": "[{"}, "tools is not JSON"),
        ({"messages": CHAT[:2], "tools": {"name": "count"}}, "tools is not a list of objects"),
        ({"messages": CHAT[:2], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs sets messages"),
        ({"messages": [{"role": "system", "content": "a"}, *CHAT[:2]], "system": "b"}, "a field system and another message"),
        ({"messages": CHAT[:2], "system": ["a"]}, "system is of type list, not a text"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "history is not a list of pairs"),
        ({"prompt": "x", "completion": "y", "tools": [{"name": "count"}]}, "tools cannot be used without a chat template"),
        ({"prompt": CHAT[:2], "completion": CHAT[:1]}, "no turn of the assistant to train on"),
        ({"messages": str(CHAT)}, "messages is a text, neither a list of messages nor JSON of one"),
        ({"messages": [{"role": "user", "content": "half a pair \ud800"}, CHAT[1]]}, "its text cannot be encoded"),
        ({"prompt": "half a pair \ud800", "completion": "x"}, "its text cannot be encoded"),
    ],
)  # fmt: skip
def test_records_without_an_answer_are_unusable(folder, record, reason):
    with pytest.raises(UnusableRecord, match=reason):
        examples(folder).of(record)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "x", "chosen": "y"}, "rejected is missing or empty; its fields: prompt, chosen"),
        ({"prompt": "x", "chosen": "", "rejected": "y"}, "chosen is missing or empty"),
        ({"prompt": 1, "chosen": "x", "rejected": "y"}, "type int is neither a text nor a list of messages"),
        ({"prompt": "x", "chosen": 1, "rejected": "y"}, "type int is neither a text nor a list of messages"),
        (
            {"prompt": "x", "chosen": CHAT[1:], "rejected": CHAT[3:]},
            "chosen cannot be used.*; their roles: assistant, user",
        ),
    ],
)
def test_pairs_without_two_answers_are_unusable(folder, record, reason):
    with pytest.raises(UnusableRecord, match=reason):
        examples(folder, "dpo").of(record)


def test_messages_may_be_json_as_in_csv_files(folder):
    one, two = [{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]
    for kind, record in (
        ("sft", {"messages": CHAT}),
        ("sft", {"prompt": CHAT[:1], "completion": one}),
        ("dpo", {"prompt": CHAT[:1], "chosen": one, "rejected": two}),
        ("dpo", {"prompt": "How many?", "chosen": CHAT[:1] + one, "rejected": CHAT[:1] + two}),
        ("dpo", {"chosen": CHAT[:1] + one, "rejected": CHAT[:1] + two}),
    ):
        written = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()
        }
        expected, found = (examples(folder, kind).of(each).sequences for each in (record, written))
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    text = {"prompt": "Write a chat.", "completion": json.dumps(CHAT)}  # which the model is to write
    assert examples(folder).of(text).bytes == len("".join(text.values()))


@pytest.mark.parametrize(
    ("prompt", "shared", "expected"),
    [
        ([], CHAT[:3], CHAT[:3]),
        ("Hi", CHAT[:3], CHAT[:3]),  # contained
        ("Hi", [{"role": "system", "content": "Be kind"}, CHAT[0]], [{"role": "system", "content": "Be kind"}, CHAT[0]]),
        ("Hi", CHAT[1:3], CHAT[:3]),  # continued
        (CHAT[:2], CHAT[2:3], CHAT[:3]),
    ],
)  # fmt: skip
def test_shared_turns_of_a_pair_follow_a_prompt_that_they_do_not_contain(folder, prompt, shared, expected):
    chosen, rejected = ([*shared, {"role": "assistant", "content": text}] for text in ("x", "y"))
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}{EOS}\n" for message in expected)
    for sequence in examples(folder, "dpo").of(record).sequences:
        assert parts(folder, sequence)[0] == f"{turns}<|im_start|>assistant\n"


def test_long_records_are_truncated_or_dropped(folder):
    record = {"prompt": "abcd", "completion": "efghij"}
    cut = examples(folder, length=8).of(record)
    assert cut.truncated
    assert parts(folder, cut.sequences[0]) == ("abcd", "efgh")
    assert examples(folder, length=8, too_long="drop").of(record).sequences == ()
    assert examples(folder, length=4).of(record).sequences == ()  # nothing of the answer is left
