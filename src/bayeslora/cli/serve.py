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
    """Serve a run over HTTP: probabilities over choices, and OpenAI-style text with its uncertainty.

    curl http://127.0.0.1:8000/v1/choices -H 'Content-Type: application/json'
    -d '{"question": "Which of these can fly?", "choices": ["a bat", "a trout"]}'

    A web page is at http://127.0.0.1:8000, and the base url for OpenAI's clients is http://127.0.0.1:8000/v1. Ctrl-C or SIGTERM
    stops the server after the accepted requests are answered.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts other machines: set a token, too."""
    port: int = 8000
    """Port to listen on; 0 takes any free port."""
    allowed_hosts: tuple[str, ...] = ()
    """Host headers to accept, besides localhost and, if other machines have access, IP addresses; * for all."""
    token_file: Path | None = None
    """File with the bearer token that requests must send; by default BAYESLORA_TOKEN of the environment, if set."""
    raw: bool = False
    """Ignore the calibration of the run."""
    evaluation: Path | None = None
    """Directory written by evaluate --out after calibrate: its metrics replace the run's own, which predate calibrate."""
    limits: OmitArgPrefixes[Limits] = field(default_factory=Limits)

    def run(self) -> None:
        """Serve, with the url on stdout once the server is ready."""
        self.require_directory()
        if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client")):
            raise InputError(
                "serving needs fastapi, uvicorn and prometheus-client; run: pip install 'fastapi>=0.132' uvicorn "
                "prometheus-client"
            )
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
    """Exit the process immediately: an interpreter that shuts down while a thread computes aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
