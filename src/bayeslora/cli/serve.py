"""The verb that serves a trained run over HTTP."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from bayeslora.cli.common import OfDraws
from bayeslora.errors import InputError
from bayeslora.hub_names import is_hub_id
from bayeslora.number_checks import check_number
from bayeslora.runs.location import find_directory
from bayeslora.server.announcement import Announcement
from bayeslora.server.bearer import read_token
from bayeslora.server.libraries import require_libraries
from bayeslora.server.limits import Limits
from bayeslora.server.resident import end_residents


@dataclass(frozen=True, kw_only=True)
class Serve(OfDraws):
    """Serve a run over HTTP: probabilities over choices, and OpenAI-style text with its uncertainty.

    curl http://127.0.0.1:8000/v1/choices -H 'Content-Type: application/json' \\
        -d '{"question": "Which of these can fly?", "choices": ["a bat", "a trout"]}'

    A web page is at http://127.0.0.1:8000, and the base url for OpenAI's clients is http://127.0.0.1:8000/v1. Ctrl-C or SIGTERM
    stops the server after the accepted requests are answered, and so does bayeslora serve DIR --stop.
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
    idle: float | None = None
    """End the server after this many minutes without a question or text; by default it goes on."""
    stop: bool = False
    """End your servers of this run on this machine, also those of predict --stay, instead of starting one."""
    limits: OmitArgPrefixes[Limits] = field(default_factory=Limits)

    def run(self) -> None:
        """Serve, with the url on stdout once the server is ready; or end servers."""
        if self.stop:
            self._stop()
            return
        self.require_directory()
        if self.idle is not None:
            check_number("idle", self.idle, above=0)
        require_libraries()
        from bayeslora.server.hosts import Hosts, check_hosts, is_local
        from bayeslora.server.run import bind, serve, url_of

        check_hosts(self.allowed_hosts)
        token = read_token(self.token_file)
        served = self.served(raw=self.raw)  # before it is loaded: the run may change meanwhile
        listening = bind(self.host, self.port)
        if token is None and not is_local(self.host):
            print(
                f"bayeslora: warning: everyone who can reach {self.host} can ask questions; give --token-file or BAYESLORA_TOKEN",
                file=sys.stderr,
            )
        with listening, self.loaded(raw=self.raw) as trained:
            if trained.samples > self.limits.max_samples:
                raise InputError(
                    f"samples is {trained.samples}, and max-samples allows {self.limits.max_samples}; "
                    "raise --max-samples, or give fewer --samples"
                )
            url, given = url_of(listening), str(self.directory)
            name = given if is_hub_id(given) else trained.directory.path.resolve().name
            announcement = Announcement(
                served=served,
                place=str(trained.model.device),
                samples=trained.config.prediction.samples,
                host=listening.getsockname()[0],
                port=listening.getsockname()[1],
                token=token,
                idle=self.idle,
            )

            def ready() -> None:
                _announce(announcement)
                print(json.dumps({"url": url, "model": name}) if self.json else f"serving {name} at {url}", flush=True)

            hosts = Hosts.of(self.host, self.allowed_hosts)
            idle = None if self.idle is None else 60 * self.idle
            try:
                ended = serve(
                    trained, name, listening, self.limits, token, self.evaluation, hosts, ready, announcement, idle
                )
            finally:
                announcement.remove()
        if not ended:
            _leave()

    def _stop(self) -> None:
        urls = end_residents(find_directory(self.directory))
        if self.json:
            print(json.dumps({"ended": urls}))
        else:
            print("\n".join(f"ended the server at {url}" for url in urls) or "no server of this run was found")


def _announce(announcement: Announcement) -> None:
    """Tell the user's other commands of the server. It works without that, too."""
    try:
        announcement.write()
    except (InputError, OSError) as error:
        print(f"bayeslora: warning: bayeslora predict will not find this server: {error}", file=sys.stderr)


def _leave() -> None:
    """Exit the process immediately: an interpreter that shuts down while a thread computes aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
