"""Chats through templates in the manner of real ones: rendered as transformers does, and nothing asked for is lost."""

from __future__ import annotations

import copy
from datetime import datetime
from pathlib import Path
from typing import Any

import chat_templates
import pytest

from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.chat.messages import checked_messages
from pagedbatch.input.chat.options import ChatOptions
from pagedbatch.input.chat.template import ChatTemplate

NOW = datetime(2024, 2, 29, 13, 5)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Wie ist's?", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "description": "of day", "parameters": CITY}},
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Is it raining?"}
ANSWER = {"role": "assistant", "content": "It is."}
CALL = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": 'He said "rain"\nand left'}


@pytest.fixture(scope="module")
def plain_tokenizer(rand_model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(rand_model_path)


class Chats:
    """A tokenizer with one of `chat_templates`, ours and transformers' ways through it."""

    def __init__(self, tokenizer: Any, template: Any, **run: Any) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.chat_template = template
        self.template = ChatTemplate(self.tokenizer, now=NOW, **run)

    def ours(self, *messages: Any, system_to_user: bool = False, **options: Any) -> str:
        return self.template.render(
            checked_messages(list(messages)), ChatOptions(**options), system_to_user=system_to_user
        )

    def theirs(self, *messages: Any, add_generation_prompt: bool = True, **options: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
        return text

    def refusal(self, *messages: Any, **options: Any) -> str:
        with pytest.raises(RowError) as refused:
            self.ours(*messages, **options)
        message = str(refused.value)
        assert "\n" not in message
        return message


@pytest.fixture
def chats(plain_tokenizer: Any) -> Any:
    def make(name: str, **run: Any) -> Chats:
        return Chats(plain_tokenizer, getattr(chat_templates, name), **run)

    return make


TAKEN_BY_ALL = [(USER,), (USER, ANSWER, USER), ({"role": "user", "content": "  x\n"}, ANSWER, USER)]
WITH_SYSTEM = [(SYSTEM, USER), (SYSTEM, USER, ANSWER, USER), ({"role": "system", "content": ""}, USER)]
WITH_CALLS = [(USER, CALLS, RESULT), (USER, CALLS, RESULT, ANSWER, USER), (USER, {**CALLS, "content": ""}, RESULT)]
WITH_BOTH = [(USER, {**CALLS, "content": "Let me see."}, RESULT)]
THOUGHT = {"role": "assistant", "content": "<think>\nrain?\n</think>\n\nIt is."}
WITH_THOUGHTS = [
    (USER, THOUGHT, USER),
    (USER, {**ANSWER, "reasoning_content": "rain?"}, USER),
    (USER, {"role": "assistant", "content": "<think>rain?</think>"}, USER),
]


@pytest.mark.parametrize(
    ("name", "conversations"),
    [
        ("CHATML", TAKEN_BY_ALL + WITH_SYSTEM + WITH_THOUGHTS),
        ("QWEN2_5", TAKEN_BY_ALL + WITH_SYSTEM + WITH_CALLS + WITH_BOTH + WITH_THOUGHTS),
        ("QWEN3", TAKEN_BY_ALL + WITH_SYSTEM + WITH_CALLS + WITH_BOTH + WITH_THOUGHTS),
        ("LLAMA3_1", TAKEN_BY_ALL + WITH_SYSTEM + WITH_CALLS + WITH_BOTH),
        ("GLM4", TAKEN_BY_ALL + WITH_SYSTEM + WITH_CALLS + WITH_BOTH),
        ("GEMMA2", TAKEN_BY_ALL),
        ("MISTRAL", TAKEN_BY_ALL + WITH_SYSTEM),
        ("DEEPSEEK", TAKEN_BY_ALL + WITH_SYSTEM + WITH_THOUGHTS),
        ("DEVELOPER", [*TAKEN_BY_ALL, ({"role": "developer", "content": "Be brief."}, USER)]),
    ],
)
def test_what_templates_trim_move_quote_and_cut_is_rendered_as_transformers_does(
    chats: Any, name: str, conversations: list[Any]
) -> None:
    both = chats(name)
    for messages in conversations:
        for _ in range(2):  # the second time with what was learnt of its shape
            assert both.ours(*messages) == both.theirs(*messages)


@pytest.mark.parametrize("name", ["QWEN2_5", "QWEN3", "LLAMA3_1", "GLM4"])
def test_tools_are_rendered_as_transformers_does(chats: Any, name: str) -> None:
    both = chats(name)
    for messages in ((USER,), (USER, CALLS, RESULT), (SYSTEM, USER) if name == "QWEN2_5" else (USER,)):
        assert both.ours(*messages, tools=TOOLS) == both.theirs(*messages, tools=TOOLS)
        assert both.ours(*messages, tools=TOOLS) != both.ours(*messages)


@pytest.mark.parametrize("name", ["CHATML", "GEMMA2", "MISTRAL", "DEEPSEEK"])
def test_tools_without_a_place_for_them(chats: Any, name: str) -> None:
    assert chats(name).refusal(USER, tools=TOOLS) == "tools: the chat template has no place for tools"


def test_tools_that_a_template_reads_and_drops(plain_tokenizer: Any) -> None:
    say = "{% for m in messages %}{{ m.content }}{% endfor %}"
    never = Chats(plain_tokenizer, "{% if tools and no_such %}{{ tools }}{% endif %}" + say)
    assert never.refusal(USER, tools=TOOLS) == "tools: the chat template has no place for tools"
    first = Chats(plain_tokenizer, "{% if tools %}{{ tools[0] | tojson }}{% endif %}" + say)
    assert first.refusal(USER, tools=TOOLS).startswith("tools[1] leaves no trace in the prompt: {'type': 'function'")
    assert first.ours(USER, tools=TOOLS[:1]) == first.theirs(USER, tools=TOOLS[:1])


def test_a_template_of_its_own_for_tools_is_chosen_as_transformers_does(plain_tokenizer: Any) -> None:
    both = Chats(plain_tokenizer, {"default": chat_templates.CHATML, "tool_use": chat_templates.QWEN2_5})
    assert both.ours(USER, tools=TOOLS) == both.theirs(USER, tools=TOOLS)
    assert both.ours(USER) == both.theirs(USER)
    none = Chats(plain_tokenizer, {"rag": chat_templates.CHATML})
    assert none.refusal(USER).startswith("the chat template can't be chosen: This model has multiple chat templates")


def test_documents_need_a_place_too(plain_tokenizer: Any, chats: Any) -> None:
    documents = [{"title": "Rain", "text": "It rains."}]
    assert chats("QWEN3").refusal(USER, documents=documents).startswith("documents: the chat template has no place")
    source = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    both = Chats(plain_tokenizer, source)
    assert both.ours(USER, documents=documents) == "It rains.Is it raining?" == both.theirs(USER, documents=documents)


def test_template_variables(chats: Any) -> None:
    both = chats("QWEN3")
    quick = both.ours(USER, variables={"enable_thinking": False})
    assert quick == both.theirs(USER, enable_thinking=False) != both.ours(USER)
    assert "never reads 'enable_thinkin'; it reads" in both.refusal(USER, variables={"enable_thinkin": False})
    assert "never reads 'enable_thinking'" in chats("QWEN2_5").refusal(USER, variables={"enable_thinking": False})


def test_template_variables_of_the_run(chats: Any) -> None:
    both = chats("QWEN3", variables={"enable_thinking": False})
    assert both.ours(USER) == both.theirs(USER, enable_thinking=False)
    assert both.ours(USER, variables={"enable_thinking": True}) == both.theirs(USER)
    for name, reason in (
        ("tools", "has a meaning of its own"),
        ("thinking", "the chat template never reads 'thinking'"),
    ):
        with pytest.raises(UsageError, match=f"^--chat-template-kwargs: .*{reason}"):
            chats("QWEN3", variables={name: True})


def test_template_variables_without_a_template(plain_tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"^--chat-template-kwargs: this model's tokenizer has no chat template"):
        Chats(plain_tokenizer, None, variables={"enable_thinking": True})


@pytest.mark.parametrize("name", ["CHATML", "QWEN2_5", "LLAMA3_1", "GLM4", "GEMMA2"])
@pytest.mark.parametrize("content", ["A lake is", "A lake is ", "A lake is\n\n"])
def test_a_last_message_goes_on(chats: Any, name: str, content: str) -> None:
    both = chats(name)
    messages = (USER, {"role": "assistant", "content": content})
    open_ended = both.ours(*messages, continue_final_message=True, add_generation_prompt=False)
    assert open_ended == both.theirs(*messages, continue_final_message=True, add_generation_prompt=False)
    assert open_ended.rstrip().endswith("A lake is")
    assert len(open_ended) < len(both.ours(*messages))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((USER,), "the last message must be the assistant's, it is of role 'user'"),
        ((USER, CALLS), "the last message has no content to continue"),
        ((USER, {"role": "assistant", "content": "<think>\na\n\n\n</think>\nb"}), "the chat template changes the last"),
    ],
)
def test_a_message_that_cannot_go_on(chats: Any, messages: Any, reason: str) -> None:
    refusal = chats("QWEN3").refusal(*messages, continue_final_message=True, add_generation_prompt=False)
    assert refusal.startswith(f"continue_final_message: {reason}")


def test_no_turn_is_opened_where_none_is_wanted(chats: Any) -> None:
    both = chats("QWEN3")
    assert both.ours(USER, add_generation_prompt=False) == both.theirs(USER, add_generation_prompt=False)
    never = chats("MISTRAL")
    assert never.refusal(USER, add_generation_prompt=False).startswith("add_generation_prompt false: ")
    assert never.ours(USER, ANSWER, add_generation_prompt=False) == never.theirs(USER, ANSWER)


def test_no_turn_is_to_be_opened_where_one_always_is(plain_tokenizer: Any) -> None:
    always = Chats(plain_tokenizer, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    refusal = always.refusal(USER, ANSWER, add_generation_prompt=False)
    assert refusal.startswith("add_generation_prompt false: the chat template always opens an assistant's turn")


@pytest.mark.parametrize("name", ["QWEN2_5", "QWEN3", "GLM4"])
def test_a_developer_is_a_system_message_where_there_is_no_developer(chats: Any, name: str) -> None:
    developer = {**SYSTEM, "role": "developer"}
    both = chats(name)
    assert both.theirs(developer, USER) == both.theirs({**SYSTEM, "role": "developer", "content": "?"}, USER)  # dropped
    assert both.ours(developer, USER) == both.theirs(SYSTEM, USER)


def test_a_developer_where_a_template_needs_tools(plain_tokenizer: Any) -> None:
    both = Chats(plain_tokenizer, {"default": chat_templates.CHATML, "tool_use": chat_templates.TOOLS_ALONE})
    developer = {**SYSTEM, "role": "developer"}
    assert both.ours(developer, USER, tools=TOOLS) == both.theirs(SYSTEM, USER, tools=TOOLS)
    assert both.ours(developer, USER) == both.theirs(developer, USER)
    refusal = both.refusal(USER, {"role": "human", "content": "e"}, USER, tools=TOOLS)
    assert refusal.endswith("the chat template has no role 'human'; it takes system, user, assistant")


def test_a_developer_where_templates_have_other_ways(chats: Any) -> None:
    developer = {**SYSTEM, "role": "developer"}
    own = chats("DEVELOPER")
    assert own.ours(developer, USER) == own.theirs(developer, USER)
    gemma = chats("GEMMA2")
    assert gemma.refusal(developer, USER).startswith("the chat template refuses the messages: Conversation roles")
    folded = {"role": "user", "content": "Be brief.\n\nIs it raining?"}
    assert gemma.ours(developer, USER, system_to_user=True) == gemma.theirs(folded)


@pytest.mark.parametrize("name", ["QWEN2_5", "QWEN3", "GLM4"])
@pytest.mark.parametrize("role", ["human", "function", "model", "gpt", "User"])
def test_a_role_that_a_template_drops(chats: Any, name: str, role: str) -> None:
    both = chats(name)
    for content in ("e", "Is it raining?", "user"):  # some of which stand in the text for other reasons
        refusal = both.refusal(USER, {"role": role, "content": content}, USER)
        expected = f"the chat template has no role {role!r}; it takes system, user, assistant, tool"
        assert refusal == f"messages[1] leaves no trace in the prompt: {expected}"


def test_a_message_that_is_dropped_in_its_place_alone(plain_tokenizer: Any) -> None:
    source = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    refusal = Chats(plain_tokenizer, source).refusal(USER, {**USER, "content": ""}, SYSTEM)
    assert refusal.startswith(
        "messages[2] leaves no trace in the prompt: the chat template drops a message of role 'sys"
    )


def test_tool_calls_that_are_dropped(plain_tokenizer: Any) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    both = Chats(plain_tokenizer, source)
    refusal = both.refusal(USER, {**CALLS, "content": "Let me see."}, RESULT)
    expected = "messages[1].tool_calls[0] leaves no trace in the prompt: the chat template drops it"
    assert refusal == expected
    assert both.refusal(USER, CALLS, {**RESULT, "content": "weather"}) == expected


def test_a_number_is_that_of_the_row_also_when_system_messages_have_moved(chats: Any) -> None:
    odd = {"role": "human", "content": "Hm."}
    both = chats("QWEN3")
    assert both.refusal(SYSTEM, USER, odd, system_to_user=True).startswith("messages[2] leaves no trace")
    assert both.refusal(SYSTEM, odd, system_to_user=True).startswith("messages[1] leaves no trace")


@pytest.mark.parametrize("name", ["QWEN2_5", "QWEN3", "LLAMA3_1", "GLM4", "DEEPSEEK"])
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}, {"city": "Paris", "unit": None}])
def test_arguments_may_be_an_object_or_its_text(chats: Any, name: str, arguments: Any) -> None:
    both = chats(name)
    given = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": arguments}}]}
    wanted: Any = '{"city": "Paris"}' if name == "DEEPSEEK" else {"city": "Paris"}
    as_wanted = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": wanted}}]}
    assert both.ours(USER, given, RESULT) == both.theirs(USER, as_wanted, RESULT)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_calls_that_a_template_joins_to_their_content(chats: Any, content: dict[str, Any]) -> None:
    both = chats("DEEPSEEK_V3")
    call = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    given = {"role": "assistant", "tool_calls": [call]}
    assert both.ours(USER, given | content, RESULT, USER) == both.theirs(USER, {**given, "content": ""}, RESULT, USER)


def test_an_ordinary_chat_is_rendered_once(plain_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its shape is known; the whole question of traces costs it no second rendering."""
    both = Chats(plain_tokenizer, chat_templates.LLAMA3_1)
    conversation = (SYSTEM, USER, CALLS, RESULT, ANSWER, USER)
    both.ours(*conversation)
    rendered = []
    render = both.tokenizer.apply_chat_template
    monkeypatch.setattr(
        both.tokenizer, "apply_chat_template", lambda *args, **options: rendered.append(1) or render(*args, **options)
    )
    both.ours(*conversation[:-1], {"role": "user", "content": "Another\nquestion?  "})
    assert len(rendered) == 1
