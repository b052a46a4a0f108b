"""A completions server as vLLM is one, on stock PEFT; it can be told to fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

Reply = tuple[int, bytes]
Trouble = Callable[[int, dict[str, Any], Reply], Reply | None]
"""What to send instead of a reply, given the number of the request and the request; nothing hangs up."""


class Completions:
    """Answers ``/v1/completions`` with adapters that were exported."""

    def __init__(self, base: str, export: Path) -> None:
        names = sorted(path.parent.name for path in export.glob("*/adapter_config.json"))
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model: Any = PeftModel.from_pretrained(model, export / names[0], adapter_name=names[0]).eval()
        for name in names[1:]:
            self.model.load_adapter(export / name, adapter_name=name)
        self.names = names
        self.lock = threading.Lock()
        self.kept: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.trouble: Trouble | None = None
        self.knows_tokens = True  # as vLLM does, and others do not

    def reply(self, path: str, headers: dict[str, str], body: bytes) -> Reply | None:
        with self.lock:
            number, request = len(self.asked), json.loads(body)
            self.asked.append(request)
            self.headers.append(headers)
            reply = self._reply(path, request)
        return reply if self.trouble is None else self.trouble(number, request, reply)

    def _reply(self, path: str, request: dict[str, Any]) -> Reply:
        if path != "/v1/completions":
            return 404, json.dumps({"detail": "Not Found"}).encode()
        if request["model"] not in self.names:
            message = f"The model `{request['model']}` does not exist."
            return 404, json.dumps({"error": {"message": message, "type": "NotFoundError", "code": 404}}).encode()
        choices = [
            {"index": k, "text": "", "logprobs": self._logprobs(request, ids)}
            for k, ids in enumerate(request["prompt"])
        ]
        return 200, json.dumps({"model": request["model"], "choices": choices}).encode()

    def _logprobs(self, request: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """Of the prompt's tokens if they are to be echoed, and of the next one."""
        scores = self._scores(request["model"], tuple(ids))
        best = int(scores[-1].argmax())
        wanted = request.get("logprob_token_ids", []) if self.knows_tokens else []
        values, tops = [scores[-1, best].item()], [{f"token_id:{k}": scores[-1, k].item() for k in {best, *wanted}}]
        if request.get("echo"):
            echoed = scores[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
            values, tops = [None, *echoed, *values], [None] * len(ids) + tops
        return {"token_logprobs": values, "top_logprobs": tops}

    @torch.no_grad()
    def _scores(self, adapter: str, ids: tuple[int, ...]) -> torch.Tensor:
        """Log-probabilities of what follows each token, computed once: most tests ask the same."""
        if (adapter, ids) not in self.kept:
            self.model.set_adapter(adapter)
            self.kept[adapter, ids] = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return self.kept[adapter, ids]


@contextmanager
def _running(server: ThreadingTCPServer | ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in a thread; yields its url."""
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def serving(completions: Completions) -> Iterator[str]:
    """The url, for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            reply = completions.reply(self.path, dict(self.headers), body)
            if reply is None:
                return
            status, content = reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if 300 <= status < 400:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, _running(server) as url:
        yield url


@contextmanager
def dripping(start: bytes) -> Iterator[str]:
    """The url of a server that answers with ``start`` and then a byte every 50 ms, for some seconds."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                self.request.sendall(start)
                for _ in range(100):
                    time.sleep(0.05)
                    self.request.sendall(b"H")

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server, _running(server) as url:
        server.block_on_close = False
        yield url


# Troubles -------------------------------------------------------------------------------------------------------------


def always(status: int, content: object) -> Trouble:
    """The same reply whatever is asked."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda number, request, reply: (status, body)


def at_first(count: int, trouble: Trouble) -> Trouble:
    """The trouble for so many requests, then none."""
    return lambda number, request, reply: trouble(number, request, reply) if number < count else reply


def slow(seconds: float) -> Trouble:
    def wait(number: int, request: dict[str, Any], reply: Reply) -> Reply:
        time.sleep(seconds)
        return reply

    return wait


def changed(change: Callable[[dict[str, Any]], object]) -> Trouble:
    """A good reply in which something was changed."""

    def spoil(number: int, request: dict[str, Any], reply: Reply) -> Reply:
        answer = json.loads(reply[1])
        change(answer)
        return reply[0], json.dumps(answer).encode()

    return spoil
