"""RunningEngine: who starts and ends a model's engine. LLM and AsyncLLM share it."""

from __future__ import annotations

import os
import threading

from .engine.thread import EngineThread
from .errors import EngineClosed, ModelUnloaded
from .loading import load
from .options import Options


class RunningEngine:
    """A model's engine in its thread, or none while the model is unloaded. Nobody else starts or ends them. For any thread.

    Attributes:
        loaded: the model; without an engine while it is unloaded.
    """

    def __init__(self, options: Options) -> None:
        self.loaded = load(options)
        self._thread: EngineThread | None = EngineThread(self.loaded.engine)
        self._changing = threading.Lock()  # one load, unload or close at a time
        self._closed = False
        self._process = os.getpid()

    @property
    def thread(self) -> EngineThread:
        """To be asked for once in each call: another one may have taken its place the next time.

        Raises:
            ModelUnloaded: there is none until `load`.
            EngineClosed: there will be none.
        """
        thread = self._thread
        if thread is None:
            raise self._closed_error() if self._closed else self._unloaded_error()
        return thread

    def unload(self) -> None:
        """Ends what runs with ModelUnloaded, then frees the engine. No error where there is none."""
        self._check_process()
        with self._changing:
            self._end(self._unloaded_error())

    def load(self) -> None:
        """Starts the engine again. No error where there is one."""
        self._check_process()
        with self._changing:
            if self._closed:
                raise self._closed_error()
            if self._thread is None:
                self.loaded.reopen()
                self._thread = EngineThread(self.loaded.engine)

    def close(self) -> None:
        """Ends what runs with finish_reason "abort", then frees the engine for good."""
        if os.getpid() != self._process:  # neither the thread nor what the lock guards came along when this process was forked
            return
        with self._changing:
            self._closed = True
            self._end(None)

    def _end(self, error: EngineClosed | None) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(error)
            self.loaded.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            why = "this process was forked from the one that loaded the model"
            raise EngineClosed("the engine runs in another process", why, "Load the model after the fork.")

    @staticmethod
    def _unloaded_error() -> ModelUnloaded:
        mend = "Call load_model(), then send the request again."
        return ModelUnloaded("the model is unloaded", "unload_model() has given its memory back", mend)

    @staticmethod
    def _closed_error() -> EngineClosed:
        return EngineClosed("the model is closed", "it cannot be used after close()", "Make a new one.")
