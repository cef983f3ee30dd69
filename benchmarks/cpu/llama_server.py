"""llama.cpp's own server as an engine, for requests at once. Nothing but the standard library is asked of this side."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import threading
import time

CACHE_MB = 2048  # of prompts that no slot holds any more
START_S = 300  # until it has loaded


class LlamaServer:
    """One process, with a slot for each request of a phase: continuous batching and prompt cache on, greedy, prompts as ids.

    A phase that needs more slots, or longer ones, starts it anew: in the first run of a workload, which does not count.
    """

    def __init__(self, model: str, threads: int, longest: int, requests: int, binary: str | None = None) -> None:
        if binary is None:
            raise ModuleNotFoundError("no llama-server was named", name="llama-server")
        if not os.access(binary, os.X_OK):
            raise RuntimeError(f"{binary} is not a program")
        self.command = [binary, "--model", model, "--threads", str(threads), "--threads-batch", str(threads)]
        self.command += ["--cache-ram", str(CACHE_MB), "--batch-size", "2048", "--ubatch-size", "512"]
        self.process: subprocess.Popen | None = None
        self.slots = self.context = 0  # how many, and tokens of each

    def run(self, phase: list) -> dict:
        """Seconds from sending the first request until the last has its whole answer. The first token is not asked for."""
        longest = max(len(ids) + new for ids, new in phase)
        if self.process is None or len(phase) > self.slots or longest > self.context:
            self._start(max(len(phase), self.slots), -(-longest // 256) * 256)
        bodies = [json.dumps(request(ids, new)) for ids, new in phase]
        tokens: list[int | Exception] = [0] * len(phase)

        def send(i: int) -> None:
            try:
                tokens[i] = self._post(bodies[i])["tokens_predicted"]
            except Exception as error:
                tokens[i] = error

        senders = [threading.Thread(target=send, args=(i,)) for i in range(len(phase))]
        begin = time.perf_counter()
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        seconds = time.perf_counter() - begin
        if failed := [t for t in tokens if isinstance(t, Exception)]:
            raise failed[0]
        if tokens != [new for _, new in phase]:
            raise RuntimeError(f"answers have {tokens} tokens")
        return {"seconds": seconds, "first_s": None, "tokens": sum(tokens)}

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.log.close()
            self.process = None

    def _start(self, slots: int, context: int) -> None:
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        room = ["--parallel", str(slots), "--ctx-size", str(slots * context), "--host", "127.0.0.1", "--port", str(self.port)]
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen([*self.command, *room], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.slots, self.context = slots, context
        end = time.monotonic() + START_S
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                self.log.seek(0)
                said = self.log.read().strip().splitlines() or ["nothing"]
                self.close()
                raise RuntimeError(f"llama-server did not start, and said: {said[-1]}")
            time.sleep(0.02)

    def _healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _post(self, body: str) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {answer.decode(errors='replace')[:200]}")
        return json.loads(answer)


def request(ids: list[int], new: int) -> dict:
    asked = {"prompt": ids, "n_predict": new, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
    return asked | {"stream": False, "response_fields": ["tokens_predicted"]}
