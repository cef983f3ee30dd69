"""`nano-vllm chat`: a conversation on the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import PromptTooLong, RequestError
from . import _flags

HELP = "talk with a model; /help tells the chat's own commands"

COMMANDS = """\
/help         this text
/reset        forget the conversation, keep the system message
/system TEXT  set the system message and start over; without TEXT: none
/save FILE    write the conversation to a file (Markdown)
/exit         leave; so does Ctrl-D. Ctrl-C stops an answer and keeps its text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message before the conversation")
    _flags.add_generation(parser, up_to_context=True)


def tell(text: str) -> None:
    """A remark of the chat itself: on stderr, so that stdout holds the answers alone."""
    print(text, file=sys.stderr, flush=True)


class Chat:
    """The conversation.

    Attributes:
        messages: as the chat template gets them, the system message first where there is one.
    """

    def __init__(self, llm, params, meter, system: str | None) -> None:
        self.llm, self.params, self.meter = llm, params, meter
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def command(self, line: str) -> bool:
        """Runs a line that begins with a slash. False ends the chat."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self.reset()
            tell("(the conversation is forgotten)")
        elif word == "/system":
            self.system = rest.strip() or None
            self.reset()
            tell("(system message set, the conversation starts over)" if self.system else "(no system message)")
        elif word == "/save":
            self.save(rest.strip())
        elif word == "/help":
            tell(COMMANDS)
        else:
            tell(f"no command {word}\n{COMMANDS}")
        return True

    def save(self, name: str) -> None:
        if not name:
            return tell("/save needs a file's name")
        if not any(message["role"] != "system" for message in self.messages):
            return tell(f"(nothing has been said, so {name} was not written)")
        text = "".join(f"**{m['role']}**\n\n{m['content']}\n\n" for m in self.messages)
        try:
            Path(name).expanduser().write_text(text, "utf-8")
        except (OSError, ValueError, RuntimeError) as error:  # whatever a name can do wrong, the conversation goes on
            return tell(f"cannot write {name!r}: {getattr(error, 'strerror', None) or error}")
        tell(f"({len(self.messages)} messages written to {name})")

    def say(self, text: str) -> None:
        """One turn. A turn that cannot run is taken back, so the history holds only what the model has answered."""
        from . import _meter

        self.messages.append({"role": "user", "content": text})
        try:
            answer = _meter.Answer(self.llm, self.llm.stream_chat(list(self.messages), self.params), self.meter)
            stopped = self.listen(answer)
        except PromptTooLong as error:
            self.messages.pop()
            return tell(f"{error} The conversation no longer fits the context: /reset starts over (/save FILE keeps a copy).")
        except RequestError as error:
            self.messages.pop()
            return tell(str(error))
        self.messages.append({"role": "assistant", "content": answer.text})
        if stopped:
            return tell("(stopped)")
        full = answer.output is not None and answer.output.finish_reason == "length"
        if full and self.params.max_tokens is None:
            tell("(the context is full, the answer is cut: /reset starts over)")

    def listen(self, answer) -> bool:
        """Shows the answer; True when Ctrl-C stopped it."""
        try:
            answer.show()
        except KeyboardInterrupt:
            return True
        finally:
            if answer.tokens and not answer.text.endswith("\n"):
                print(flush=True)
        return False

    def loop(self) -> None:
        """Reads lines until /exit or the end of input."""
        if sys.stdin is None:  # closed by the caller (`<&-`)
            return
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt).strip()
            except KeyboardInterrupt:
                tell("\n(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                return
            except UnicodeDecodeError as error:
                tell(f"(that line is not {error.encoding} text and was not sent)")
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line:
                self.say(line)


def main(args: argparse.Namespace) -> int:
    """Talks until the end of input; answers reach up to the end of the context, unless --max-tokens is given."""
    from . import _meter, _model, _text

    try:
        import readline  # noqa: F401  input() then edits lines and keeps their history
    except ImportError:
        pass
    given = _model.checked(args)
    system = args.system and _text.argument(args.system, "the system message")
    with _model.loaded(args) as llm:
        meter = _meter.Meter.of(llm.stats())
        chat = Chat(llm, _model.params(llm, given, max_tokens=None), meter, system)
        terminal = sys.stdin is not None and sys.stdin.isatty()
        if terminal:
            context = f"{llm.options.model}, context {llm.plan.max_model_len:,} tokens."
            tell(f"{context} /help tells the commands, Ctrl-C stops an answer.")
        chat.loop()
        if terminal:
            print(file=sys.stderr)
        meter.tell()
    return 0
