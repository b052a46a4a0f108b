"""The verb that serves a trained run over HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from bayeslora.cli.common import OfDraws
from bayeslora.errors import InputError
from bayeslora.server.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Serve(OfDraws):
    """Answer over HTTP: probabilities over choices, and OpenAI-style text with its uncertainty.

    curl http://127.0.0.1:8000/v1/choices -H 'Content-Type: application/json'
    -d '{"question": "Which of these can fly?", "choices": ["a bat", "a trout"]}'

    A page for people is at http://127.0.0.1:8000, and for OpenAI's clients the base url is http://127.0.0.1:8000/v1. Ctrl-C or
    SIGTERM ends it, after what was taken is answered.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in, and then wants a token."""
    port: int = 8000
    """Port to listen on; 0 takes any that is free."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may be for (their Host), besides localhost and, if other machines reach it, IP addresses; * for all."""
    token_file: Path | None = None
    """File with the bearer token that requests must bring; without it BAYESLORA_TOKEN of the environment counts, if set."""
    raw: bool = False
    """Leave out what calibrate found."""
    evaluation: Path | None = None
    """What evaluate --out wrote after calibrate: its figures are shown instead of the run's own, which are from before."""
    limits: OmitArgPrefixes[Limits] = field(default_factory=Limits)

    def run(self) -> None:
        """Serve, with the url on stdout once requests are answered."""
        if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
            raise InputError("serving needs fastapi and uvicorn; run: pip install 'fastapi>=0.132' uvicorn")
        from bayeslora.server.hosts import Hosts, check_hosts, is_local
        from bayeslora.server.run import bind, read_token, serve, url_of

        check_hosts(self.allowed_hosts)
        token = read_token(self.token_file)
        listening = bind(self.host, self.port)
        if token is None and not is_local(self.host):
            print(
                f"bayeslora: warning: everybody who reaches {self.host} may ask; give --token-file or BAYESLORA_TOKEN",
                file=sys.stderr,
            )
        with listening, self.loaded(raw=self.raw) as trained:
            if trained.samples > self.limits.max_samples:
                raise InputError(
                    f"samples is {trained.samples} and max-samples {self.limits.max_samples}; raise that, or give --samples"
                )
            url = url_of(listening)

            def ready() -> None:
                told = {"url": url, "model": trained.directory.path.resolve().name}
                print(json.dumps(told) if self.json else f"serving {told['model']} at {url}", flush=True)

            hosts = Hosts.of(self.host, self.allowed_hosts)
            ended = serve(trained, listening, self.limits, token, self.evaluation, hosts, ready)
        if not ended:
            _leave()


def _leave() -> None:
    """End the process at once: an interpreter that is torn down while a thread computes aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
