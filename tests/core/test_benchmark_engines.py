"""The benchmark's engines that are other programs, against stand-ins for these."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.cpu import engines, llama_server

# Answers with n_predict tokens; prompts of ones and twos wait until as many requests are there as it has slots.
SERVER = """#!{python}
import http.server, json, sys, threading
slots = int(sys.argv[sys.argv.index("--parallel") + 1])
print("started with", sys.argv[1:], file=open("{log}", "a"))
together = threading.Barrier(slots)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"][0] in (1, 2):
            together.wait(60)
        fits = asked["prompt"] != [0] and asked["ignore_eos"] and asked["cache_prompt"] and asked["temperature"] == 0
        self.answer(200 if fits else 400, {{"tokens_predicted": asked["n_predict"]}})
    def answer(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_gets_a_phase_at_once_and_is_kept_while_it_has_room(tmp_path):
    binary, log = tmp_path / "llama-server", tmp_path / "log"
    binary.write_text(SERVER.format(python=sys.executable, log=log))
    binary.chmod(0o755)
    server = llama_server.LlamaServer("m.gguf", 2, 9, 64, str(binary))
    try:
        answer = server.run([([1] * 200, 5), ([2] * 9, 7)])
        assert answer["tokens"] == 12 and answer["first_s"] is None and answer["seconds"] > 0
        process = server.process
        assert server.run([([3], 4)])["tokens"] == 4 and server.process is process
        with pytest.raises(RuntimeError, match="answered 400"):
            server.run([([0], 4)])
        assert server.run([([3] * 256, 5)])["tokens"] == 5 and server.process is not process
        assert process.poll() is not None
        first, second = log.read_text().splitlines()
        assert "--parallel', '2', '--ctx-size', '512'" in first and "--parallel', '2', '--ctx-size', '1024'" in second
    finally:
        server.close()
    binary.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="no such model"):
        server.run([([1], 1)])


def test_without_a_server_it_is_said_how_to_get_one(capsys):
    engines.work("llama-server", {"model": "m", "threads": 1, "longest": 9, "requests": 1, "binary": None})
    assert "make llama-server" in json.loads(capsys.readouterr().out)["absent"]


def test_without_onnxruntime_it_is_said_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    engines.work("onnxruntime", {"model": "m", "threads": 1, "longest": 9, "requests": 1, "folder": "f"})
    absent = json.loads(capsys.readouterr().out)["absent"]
    assert "not installed (onnxruntime_genai)" in absent and "pip install onnxruntime-genai==" in absent
