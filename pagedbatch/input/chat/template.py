"""A model's chat template: from messages to the text of a prompt, in which everything that was asked for stands.

Knows a Hugging Face tokenizer; no rows and no token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.chat.messages import (
    Message,
    fold_system,
    with_arguments_as_text,
    with_empty_contents,
    with_role,
)
from pagedbatch.input.chat.options import ChatOptions, variables_problem
from pagedbatch.input.chat.template_source import DATE, NOW, reads, variables_of, with_clock
from pagedbatch.input.chat.traces import MARK, Traces, names_missing
from pagedbatch.wording import first_line, short

_CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
_QUESTION, _ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
#: A chat in which a message of each role stands where templates expect it.
_CHATS_WITH_ROLE: dict[str, list[Message]] = {
    "system": [{"role": "system", "content": MARK}, _QUESTION],
    "developer": [{"role": "developer", "content": MARK}, _QUESTION],
    "user": [{"role": "user", "content": MARK}],
    "assistant": [_QUESTION, {"role": "assistant", "content": MARK}, _QUESTION],
    "tool": [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": MARK},
        _ANSWER,
        _QUESTION,
    ],
}
_ROLES = ("system", "user", "assistant", "tool")
#: Some templates, those for tools alone among them, can't be rendered without one.
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]},
    },
}


class ChatTemplate:
    """Renders chats as `tokenizer.apply_chat_template` does.

    `variables` are template variables of the whole run; a row's own win. For the template it is always `now`. Where
    `asked_date` is set, a template that writes no date, or no date that can be set, is refused.
    """

    def __init__(
        self, tokenizer: Any, *, now: datetime, variables: Mapping[str, Any] | None = None, asked_date: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._now = now
        self._variables = dict(variables or {})
        self._asked_date = asked_date
        self._roles: dict[tuple[str, str, bool], bool] = {}
        self._traces = Traces()
        self._check_run()

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template at all."""
        return bool(self._tokenizer.chat_template)

    @property
    def date(self) -> str | None:
        """The day that the template writes; None where it writes none, or one of its own."""
        return self._now.date().isoformat() if any(map(self._can_write_date, self._named())) else None

    def render(self, messages: list[Message], options: ChatOptions, *, system_to_user: bool) -> str:
        """The text of a chat's prompt.

        Raises:
            RowError: there is no template, it refuses the messages, or something asked for leaves no trace in the text.
        """
        if not self.exists:
            raise RowError("messages need a chat template, and this model's tokenizer has none: give a prompt")
        if options.continue_final_message:
            _check_can_continue(messages[-1])
        try:
            template = self._tokenizer.get_chat_template(tools=options.tools)
        except Exception as error:
            raise RowError(f"the chat template can't be chosen: {first_line(error)}") from None
        self._check_read(template, options)
        given = self._known_roles(template, messages, options, system_to_user=system_to_user)
        numbers = _numbers(messages, given)
        rendered, text = self._render_either(template, given, options)
        self._check_closed(template, rendered, options, text)
        self._check_tools(template, rendered, options, text)
        lost = self._traces.first_lost(
            (template, options.tools is not None),
            rendered,
            text,
            lambda other: self._apply(template, other, options),
        )
        if lost is not None:
            raise RowError(
                self._lost_message(template, rendered[lost.message], numbers[lost.message], lost.call, options)
            )
        return text

    def _named(self) -> list[str]:
        """Every template that may be chosen."""
        template = self._tokenizer.chat_template
        named = template.values() if isinstance(template, Mapping) else [template]
        return [text for text in named if isinstance(text, str)]

    def _can_write_date(self, template: str) -> bool:
        return reads(template, NOW) or (self._asked_date and reads(template, DATE))

    def _check_run(self) -> None:
        """Refuses what a run asks of its template and no chat could get."""
        problem = variables_problem(self._variables)
        if problem is not None:
            raise UsageError(f"--chat-template-kwargs: {problem}")
        templates = self._named()
        if self._variables and not templates:
            raise UsageError("--chat-template-kwargs: this model's tokenizer has no chat template")
        for name in self._variables:
            if not any(reads(template, name) for template in templates):
                raise UsageError(f"--chat-template-kwargs: {_never_read(templates[0], name)}")
        if self._asked_date and not any(map(self._can_write_date, templates)):
            raise UsageError("--date: this model's chat template writes no date")

    def _check_read(self, template: str, options: ChatOptions) -> None:
        """Refuses what the template has no place for, as far as its source tells."""
        for name in options.variables:
            if not reads(template, name):
                raise RowError(f"chat_template_kwargs: {_never_read(template, name)}")
        if options.tools is not None and not reads(template, "tools"):
            raise RowError("tools: the chat template has no place for tools")
        if options.documents is not None and not reads(template, "documents"):
            raise RowError(
                "documents: the chat template has no place for documents (--ignore-columns takes the column for data)"
            )

    def _check_closed(self, template: str, messages: list[Message], options: ChatOptions, text: str) -> None:
        """Refuses a turn that is to stay unopened, where it can't be told that the template opens none.

        It opens none behind an answer if the next question goes on from there.
        """
        if options.add_generation_prompt or options.continue_final_message or reads(template, "add_generation_prompt"):
            return
        if messages[-1]["role"] == "assistant":
            with suppress(Exception):
                if self._apply(template, [*messages, _QUESTION], options).startswith(text):
                    return
        raise RowError("add_generation_prompt false: the chat template always opens an assistant's turn, or never")

    def _apply(self, template: str, messages: list[Message], options: ChatOptions) -> str:
        variables = {**self._variables, **options.variables}
        if self._asked_date and DATE not in variables and reads(template, DATE) and not reads(template, NOW):
            variables[DATE] = self._now.strftime("%d %b %Y")  # as Llama's templates write it
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=options.tools,
            documents=options.documents,
            chat_template=with_clock(template, self._now),
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **variables,
        )
        return text

    def _render_either(self, template: str, messages: list[Message], options: ChatOptions) -> tuple[list[Message], str]:
        """The text, and the messages in the first form that the template takes.

        Most want the arguments of tool calls as objects, some as text, and some a content beside them, if an empty one.
        """
        try:
            return messages, self._apply(template, messages, options)
        except MemoryError:  # the process that prepares rows knows how to tell it
            raise
        except Exception as error:  # a template is the model's own code, and jinja raises what it likes
            if any("tool_calls" in message for message in messages):
                with_contents = with_empty_contents(messages)
                for form in (with_arguments_as_text(messages), with_contents, with_arguments_as_text(with_contents)):
                    try:
                        return form, self._apply(template, form, options)
                    except MemoryError:
                        raise
                    except Exception:  # the first error is the one to tell
                        continue
            if options.continue_final_message and "continue_final_message" in str(error):
                reason = "the chat template changes the last message, so that it can't be continued"
                raise RowError(f"continue_final_message: {reason}") from None
            raise RowError(f"the chat template refuses the messages: {first_line(error)}") from None

    def _known_roles(
        self, template: str, messages: list[Message], options: ChatOptions, *, system_to_user: bool
    ) -> list[Message]:
        """The chat with `developer` as `system` where the template has no developer."""
        if (
            any(message["role"] == "developer" for message in messages)
            and not self._takes(template, "developer", options)
            and (system_to_user or self._takes(template, "system", options))
        ):
            messages = with_role(messages, "developer", "system")
        return fold_system(messages) if system_to_user else messages

    def _takes(self, template: str, role: str, options: ChatOptions) -> bool:
        """Whether a message of a role, in its usual place, is in the text: of a chat with tools where `options` has."""
        key = (template, role, options.tools is not None)
        if key not in self._roles:
            try:
                usual = ChatOptions(tools=None if options.tools is None else [_TOOL])
                self._roles[key] = MARK in self._apply(template, _CHATS_WITH_ROLE[role], usual)
            except Exception:
                self._roles[key] = False
        return self._roles[key]

    def _check_tools(self, template: str, messages: list[Message], options: ChatOptions, text: str) -> None:
        """Refuses tools and documents that the template drops, though it reads their variable."""
        if options.tools is not None:
            if self._is_same(template, messages, replace(options, tools=None), text):
                raise RowError("tools: the chat template has no place for tools")
            for i in names_missing(options.tools, text):
                fewer = [tool for j, tool in enumerate(options.tools) if j != i]
                if self._is_same(template, messages, replace(options, tools=fewer), text):
                    raise RowError(f"tools[{i}] leaves no trace in the prompt: {short(options.tools[i])}")
        if options.documents is not None and self._is_same(template, messages, replace(options, documents=None), text):
            raise RowError("documents: the chat template has no place for documents")

    def _is_same(self, template: str, messages: list[Message], options: ChatOptions, text: str) -> bool:
        try:
            return self._apply(template, messages, options) == text
        except Exception:  # then what was left out counts
            return False

    def _lost_message(
        self, template: str, message: Message, number: int, call: int | None, options: ChatOptions
    ) -> str:
        if call is not None:
            return f"messages[{number}].tool_calls[{call}] leaves no trace in the prompt: the chat template drops it"
        role = message["role"]
        lost = f"messages[{number}] leaves no trace in the prompt: the chat template"
        taken = [name for name in _ROLES if self._takes(template, name, options)]
        if role in taken:
            return f"{lost} drops a message of role {role!r} in this place"
        return f"{lost} has no role {short(role)}; it takes {', '.join(taken) or 'none that is known'}"


def _check_can_continue(message: Message) -> None:
    if message["role"] != "assistant":
        role = short(message["role"])
        raise RowError(f"continue_final_message: the last message must be the assistant's, it is of role {role}")
    if "content" not in message:
        raise RowError("continue_final_message: the last message has no content to continue")


def _never_read(template: str, name: str) -> str:
    known = sorted((variables_of(template) or frozenset()) - {NOW, "raise_exception", "messages", "tools", "documents"})
    return f"the chat template never reads {name!r}; it reads {', '.join(known)}"


def _numbers(messages: list[Message], folded: list[Message]) -> list[int]:
    """The place in `messages` of each message of the same chat without system messages."""
    if len(folded) == len(messages):
        return list(range(len(messages)))
    others = [i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")]
    return [0] * (len(folded) - len(others)) + others
