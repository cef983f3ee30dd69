"""The one engine thread: commands go in by a queue, updates come out through each request's sink."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy

from ..errors import EngineClosed
from .engine import Engine
from .request import ABORT, ERROR, Request

log = logging.getLogger(__name__)


class EngineThread:
    """Runs an Engine. All methods may be called from any thread; the engine itself is touched by its thread alone."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between "is it open" and "put": a command is run or refused, never lost
        self._closing = False
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nano-vllm-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[Request]) -> None:
        """Queues requests together, so that they can share their first step. This is their arrival."""
        now = time.perf_counter()
        for request in requests:
            request.arrival = now
        self._put(lambda: [self._submit(r) for r in requests])

    def abort(self, requests: list[Request]) -> None:
        """Ends these requests, and none that merely has the id of one: who was refused an id in use aborts, too."""
        engine = self.engine
        with suppress(EngineClosed):  # closing ends every request
            self._put(lambda: [engine.abort(r.id) for r in requests if engine.requests.get(r.id) is r])

    def abort_id(self, request_id: str) -> None:
        with suppress(EngineClosed):
            self._put(lambda: self.engine.abort(request_id))

    def call(self, function: Callable):
        """Runs `function(engine)` between two steps and returns its result."""
        box: queue.SimpleQueue = queue.SimpleQueue()

        def command() -> None:
            try:
                box.put((function(self.engine), None))
            except Exception as error:
                box.put((None, error))

        self._put(command)
        value, error = box.get()
        if error is not None:
            raise error
        return value

    def close(self, error: EngineClosed | None = None) -> None:
        """Ends the thread; requests that still run end with finish_reason "abort", or with `error`, which later ones raise."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closing:
                self._closing, self._failure = True, error
                self._commands.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector runs in any thread, this one too
            self._thread.join()

    def _put(self, command: Callable[[], None]) -> None:
        if os.getpid() != self._process:  # and the lock may have been held when the fork copied it
            why = "this process was forked from the one that loaded the model, and threads do not come along"
            raise EngineClosed("the engine runs in another process", why, "Load the model after the fork.")
        with self._lock:
            if self._closing:
                if isinstance(self._failure, EngineClosed):
                    raise copy(self._failure)  # several threads may raise it
                raise EngineClosed("the engine is closed", str(self._failure or ""), "Load the model again.")
            self._commands.put(command)

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:
            self.engine.refuse(request, error)

    def _run(self) -> None:
        engine = self.engine
        try:
            while self._drain_commands():
                if engine.busy:
                    engine.step()
        except BaseException as error:  # a fault of the engine itself: nobody may be left waiting
            log.exception("engine thread ended")
            self._failure = error
        with self._lock:
            self._closing = True
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command()
        for request in list(engine.requests.values()):
            self._end(request)
        engine.outstanding.clear()  # nobody waits for these steps, and their results take memory

    def _end(self, request: Request) -> None:
        """A request's last update, in whatever state a fault has left the engine's books."""
        try:
            self.engine.abort(request.id, ABORT if self._failure is None else ERROR, self._failure)
        except Exception:
            log.exception("request %s was not taken back", request.id)

    def _drain_commands(self) -> bool:
        """Runs the commands that wait; blocks for one when there is nothing else to do. False: time to end."""
        while True:
            if self._commands.empty():
                if self.engine.busy:
                    return True
                self.engine.pool.check_idle()
            command = self._commands.get()
            if command is None:
                return False
            command()
