"""Every error of the package: what happened, why, and the mend.

The HTTP status and the exit code of a command follow from the class; nothing else decides them.
"""

from __future__ import annotations


class NanoVLLMError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: the fact, in one clause.
        why: the cause, with the numbers that show it.
        mend: what the user can do, as a command or a value where there is one.
    """

    status = 500
    exit_code = 1

    def __init__(self, what: str, why: str = "", mend: str = "") -> None:
        self.what, self.why, self.mend = what, why, mend
        super().__init__(what, why, mend)

    def about(self, subject: str) -> NanoVLLMError:
        """This error, whose text now begins with what it is about."""
        self.what = f"{subject}: {self.what}"
        self.args = (self.what, self.why, self.mend)
        return self

    def __str__(self) -> str:
        text = self.what if not self.why else f"{self.what}: {self.why}"
        return text if not self.mend else f"{text.rstrip('.')}. {self.mend}"


class OptionError(NanoVLLMError, ValueError):
    """An option of the model, the engine or the command line has a wrong name or value."""

    status = 400
    exit_code = 2


class UnknownOption(OptionError, TypeError):
    """A keyword or flag that does not exist. The mend names the nearest one that does."""


class RequestError(NanoVLLMError, ValueError):
    """One request cannot be served as asked; other requests are not touched."""

    status = 400
    exit_code = 2


class ParameterError(RequestError):
    """A sampling parameter is out of its range or of the wrong type.

    Attributes:
        field: the parameter's name, for an answer that points at it.
    """

    def __init__(self, field: str, why: str, mend: str = "") -> None:
        super().__init__(f"parameter {field!r} is not valid", why, mend)
        self.field = field


class PromptError(RequestError):
    """A prompt is empty, of the wrong type, or holds ids that the vocabulary does not have."""


class PromptTooLong(PromptError):
    """The prompt, or prompt and answer together, exceed the context or the cache."""


class TemplateError(RequestError):
    """The chat template refused the messages, or is itself broken."""


class ModelNotFound(NanoVLLMError, FileNotFoundError):
    """No model answers to the name that was given."""

    status = 404
    exit_code = 2


class ModelFileError(NanoVLLMError, ValueError):
    """A model file is malformed, cut short, or lacks a tensor."""


class UnsupportedModel(NanoVLLMError, ValueError):
    """The file is sound, but its architecture, tensor type or tokenizer is not supported."""


class BackendUnavailable(NanoVLLMError, RuntimeError):
    """The backend that was asked for cannot run here."""


class NotEnoughMemory(NanoVLLMError, MemoryError):
    """What was asked does not fit the memory that may be used; the arithmetic is in `why`."""

    exit_code = 2


class EngineClosed(NanoVLLMError, RuntimeError):
    """The engine was closed, or its thread ended with an error."""

    status = 503


class ModelUnloaded(EngineClosed):
    """The model was unloaded, and not loaded again: before the request came, or while it ran."""


class RankLost(NanoVLLMError, RuntimeError):
    """One of the processes that a model is divided among has ended, and the model with it."""

    status = 503


class BatchError(NanoVLLMError, ValueError):
    """A backend was given a step that its contract does not allow: a fault of the engine, never of a request."""
