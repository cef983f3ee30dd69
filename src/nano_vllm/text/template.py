"""Chat templates: messages -> the prompt's text, and that text -> ids in which no user's text is a control token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import PromptError, TemplateError
from .guard import Guard, Shapes, strings

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

LONGEST = 16_000_000  # characters of a rendered prompt


@dataclass(frozen=True)
class Rendered:
    """Attributes:
    text: the prompt, as transformers' `apply_chat_template(tokenize=False)` gives it.
    segments: (text, whether it is a control token that the template wrote), in turn; joined they are `text`.
    guarded: some user's text spells a control token or touches one; `text` alone does not say which tokens are real.
    """

    text: str
    segments: tuple[tuple[str, bool], ...]
    guarded: bool


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja2; None or empty raises TemplateError, because a guessed format would be silently wrong.
        special_tokens: bos_token, eos_token, … -> text; variables of the template.
        control_tokens: texts that users must not be able to write; default the values of special_tokens.

    Attributes:
        reads: names of the variables that the template looks at.
    """

    def __init__(self, source: str | None, special_tokens: dict[str, str], control_tokens: Iterable[str] | None = None) -> None:
        if source is None or source == "":
            raise TemplateError(
                "the model has no chat template", "", "Prompt it with plain text (--raw, or generate), or give a template."
            )
        if not isinstance(source, str):
            raise TemplateError("a chat template must be text", f"it is {type(source).__name__}")
        from jinja2.meta import find_undeclared_variables

        from .sandbox import Sandbox

        self.source, self.special_tokens = source, dict(special_tokens)
        self._shapes = Shapes(special_tokens.values() if control_tokens is None else control_tokens)
        self._sandbox = Sandbox()
        try:
            parsed = self._sandbox.parse(source)
            self._takes_parts, self.reads = _loops_over_content(parsed), frozenset(find_undeclared_variables(parsed))
            self._program = self._sandbox.program(source)
        except Exception as error:
            raise TemplateError("the chat template is broken", f"{error} (line {getattr(error, 'lineno', '?')})") from None

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The template of a tokenizer's model, or another one for it."""
        return cls(source or tokenizer.chat_template, tokenizer.template_variables, tokenizer.special_tokens)

    def render(
        self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = True, **variables
    ) -> Rendered:
        """The prompt of a conversation.

        Args:
            messages: dicts of `role` and `content` (text, a list of {"type": "text", "text": …}, or None beside `tool_calls`).
            tools: JSON descriptions of functions.
            variables: more of the template's variables, such as enable_thinking.

        Raises PromptError for messages of another shape, TemplateError for what the template refuses.
        """
        check_messages(messages)
        if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(t, dict) for t in tools)):
            raise PromptError("tools must be a list of objects", f"it is {type(tools).__name__}")
        flat = messages if self._takes_parts else [_flat(m) for m in messages]
        guard = Guard(self._shapes, [self.source, *strings([flat, tools, variables, self.special_tokens])])
        given = {"documents": None} | self.special_tokens | {k: guard.protect(v, k) for k, v in variables.items()}
        given |= {"messages": guard.protect(flat), "tools": guard.protect(tools) if tools is not None else None}
        text = self._run(given | {"add_generation_prompt": add_generation_prompt})
        segments = tuple(guard.split(text))
        return Rendered("".join(t for t, _ in segments), segments, guard.used)

    def _run(self, variables: dict) -> str:
        self._sandbox.begin()
        pieces, length = [], 0
        try:
            for piece in self._program.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > LONGEST:
                    raise TemplateError("the chat template does not end", f"it wrote more than {LONGEST} characters")
        except TemplateError:
            raise
        except Exception as error:  # whatever a template does wrong, down to RecursionError, is the template's
            raise TemplateError("the chat template refused the messages", str(error) or type(error).__name__) from None
        return "".join(pieces)


def encode_chat(tokenizer: Tokenizer, rendered: Rendered) -> list[int]:
    """Ids of a rendered prompt: those of `apply_chat_template(tokenize=True)`, and no user's text is a control token.

    BOS stands where the template wrote it and nowhere else.
    """
    known = tokenizer.special_tokens
    if not rendered.guarded:
        # A normalizer may still turn a user's characters into a control token: then there are more than the template wrote.
        ids = tokenizer.encode(rendered.text, add_special_tokens=False, parse_special=True)
        if [i for i in ids if tokenizer.is_special(i)] == [
            known[t] for t, control in rendered.segments if control and t in known
        ]:
            return ids
    return tokenizer.encode_segments([known[t] if control and t in known else t for t, control in rendered.segments])


def check_messages(messages) -> None:
    """PromptError naming the first message that is not one."""
    if not isinstance(messages, (list, tuple)):
        raise PromptError(
            "messages must be a list", f"it is {type(messages).__name__}", 'Give [{"role": "user", "content": "…"}].'
        )
    if not messages:
        raise PromptError("there are no messages", "the list is empty", 'Give [{"role": "user", "content": "…"}].')
    for index, message in enumerate(messages):
        fault = _fault(message)
        if fault:
            raise PromptError(f"message {index} is not valid", fault)


def _fault(message) -> str:
    if not isinstance(message, dict):
        return f"it is {type(message).__name__}, not an object with role and content"
    if not isinstance(message.get("role"), str) or not message["role"]:
        return "role must be a text such as user"
    content = message.get("content")
    if content is None:
        return "" if message.get("tool_calls") else "it has no content"
    if isinstance(content, str):
        return ""
    if not isinstance(content, (list, tuple)):
        return f"content is {type(content).__name__}, not text or a list of parts"
    if not content:
        return "content has no parts"
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            return f"part {number} of content is {kind!r}; this model reads text parts alone"
    return ""


def _flat(message: dict) -> dict:
    """The message with its text parts as one text, a line each."""
    content = message.get("content")
    return message | {"content": "\n".join(p["text"] for p in content)} if isinstance(content, (list, tuple)) else message


def _loops_over_content(program) -> bool:
    """Whether a template goes through the parts of a message itself."""
    from jinja2 import nodes

    for loop in program.find_all(nodes.For):
        over = [loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]
        for node in over:
            if (
                isinstance(node, nodes.Getattr)
                and node.attr == "content"
                or isinstance(node, nodes.Name)
                and node.name == "content"
            ):
                return True
            if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content":
                return True
    return False
