"""A server under load: many clients at once, against one request at a time.

bayeslora train --model smollm2 --task urns --layers last:2 --max-train 32 --epochs 1 --out run
python benchmarks/serve_load.py --run run --out load.json
python benchmarks/serve_load.py --run run --texts 200 --clients 16 --out load.json     # also writes texts
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from bayeslora import load_run
from bayeslora.runs.environment import describe_environment

DISTINCT = 100
"""Questions, of different lengths and with 2 to 6 choices, that requests take turns in."""


@dataclass
class Load:
    """What came of many requests."""

    latencies: list[float] = field(default_factory=list)
    answers: list[tuple[int, Any]] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a trained run")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait")
    parser.add_argument("--short-queue", type=int, default=16, help="the same where clients are to be sent away")
    parser.add_argument("--texts", type=int, default=0, help="texts to write, besides the questions")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each text")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    questions = [question(number) for number in range(DISTINCT)]
    expected, device = single_answers(given.run, questions, given.device)
    with server(given, given.queue) as (process, url):
        put(url, questions, range(20), 1)  # what is slow the first time
        alone = put(url, questions, range(given.requests // 5), 1)
        before = batches(fetch(url, "/metrics"))
        together = put(url, questions, range(given.requests), given.clients, process.pid)
        answered, computed = batches(fetch(url, "/metrics")) - before
        texts = write_texts(url, given) if given.texts else {}
    with server(given, given.short_queue) as (_, url):
        crowded = put(url, questions, range(given.requests // 5), given.clients)
    record = {
        "schema": 1,
        "run": str(given.run),
        "clients": given.clients,
        "queue": given.queue,
        "one_at_a_time": figures(alone, expected),
        "together": {
            **figures(together, expected),
            "requests_per_batch": answered / computed,
            "memory": flatness(together.memory, given.requests),
        },
        "short_queue": {"queue": given.short_queue, **figures(crowded, expected)},
        "speedup": rate(together) / rate(alone),
        **texts,
        "environment": describe_environment(device),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


def question(number: int) -> dict[str, Any]:
    """One of the questions."""
    colours = ["red", "blue", "green", "white", "black", "a colour that nobody has seen"]
    words = (
        f"An urn holds {number} balls. " + "One more is put into it. " * (number % 3) + "Which colour is drawn next?"
    )
    return {"question": words, "choices": colours[: 2 + number % 5]}


def prompt(number: int, new_tokens: int) -> dict[str, Any]:
    """One of the texts to be continued."""
    words = " ".join(f"{k} balls are red," for k in range(number % 13))
    return {"prompt": f"In urn {number} {words} and", "max_tokens": new_tokens, "temperature": 0}


def write_texts(url: str, given: argparse.Namespace) -> dict[str, Any]:
    """The same for texts."""
    bodies = [prompt(number, given.new_tokens) for number in range(DISTINCT)]
    put(url, bodies, range(5), 1, path="/v1/completions")
    alone = put(url, bodies, range(max(1, given.texts // 5)), 1, path="/v1/completions")
    together = put(url, bodies, range(given.texts), given.clients, path="/v1/completions")
    wanted = dict(alone.answers)
    same = [text == wanted[row] for row, text in together.answers if row in wanted]
    return {
        "texts": {
            "new_tokens": given.new_tokens,
            "one_at_a_time": speed(alone),
            "together": speed(together),
            "speedup": rate(together) / rate(alone),
            "same_text": sum(same) / len(same),
        }
    }


def single_answers(
    run: Path, questions: Sequence[dict[str, Any]], device: str
) -> tuple[list[list[float]], torch.device]:
    """What the library answers to each question alone, and where it computes."""
    trained = load_run(run, device=device)
    answers = [list(trained.ask(one["question"], one["choices"]).probabilities) for one in questions]
    return answers, next(trained.model.parameters()).device


@contextmanager
def server(given: argparse.Namespace, queue: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``bayeslora serve`` in a process of its own, and its url."""
    words = [sys.executable, "-m", "bayeslora", "serve", str(given.run), "--port", "0", "--json", "--quiet"]
    words += ["--device", given.device, "--queue", str(queue)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        if process.wait(60) != 0:
            raise SystemExit(f"the server ended with {process.returncode}")


def put(
    url: str,
    bodies: Sequence[dict[str, Any]],
    numbers: Sequence[int],
    clients: int,
    pid: int = 0,
    path: str = "/v1/choices",
) -> Load:
    """Send requests, as many at a time as there are clients; those that are sent away come again when they were told to."""
    load, lock = Load(), threading.Lock()
    waiting = iter(numbers)

    def client() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        while True:
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            row = number % len(bodies)
            status, answer, seconds = ask(connection, path, bodies[row], load.statuses, lock)
            with lock:
                load.statuses[status] += 1
                if status == 200:
                    load.latencies.append(seconds)
                    load.answers.append((row, answer.get("probabilities") or answer["choices"][0]["text"]))
                if pid:
                    load.memory.append((len(load.latencies), resident(pid)))

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(client) for _ in range(clients)]:
            future.result()
    load.seconds = time.perf_counter() - start
    return load


def ask(
    connection: http.client.HTTPConnection,
    path: str,
    body: dict[str, Any],
    statuses: Counter[int],
    lock: threading.Lock,
) -> tuple[int, Any, float]:
    """Status, answer and seconds of the attempt that was not sent away."""
    for _ in itertools.count():
        start = time.perf_counter()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 429:
            return response.status, answer, time.perf_counter() - start
        with lock:
            statuses[429] += 1
        time.sleep(float(response.headers["Retry-After"]))
    raise AssertionError


def fetch(url: str, path: str) -> str:
    """A page of the server."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def resident(pid: int) -> int:
    """Bytes of memory that a process has in use, on Linux; 0 elsewhere."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def figures(load: Load, expected: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Speed, and how far answers are from those to each question alone."""
    differences = [np.abs(np.subtract(answer, expected[row])).max() for row, answer in load.answers]
    return {**speed(load), "largest_difference": float(max(differences))}


def speed(load: Load) -> dict[str, Any]:
    """Answers per second and latencies."""
    found = np.percentile(load.latencies, [50, 95, 99])
    return {
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "requests_per_second": rate(load),
        **{f"latency_p{k}_seconds": float(it) for k, it in zip((50, 95, 99), found, strict=True)},
    }


def rate(load: Load) -> float:
    """Answers per second."""
    return len(load.latencies) / load.seconds


def batches(metrics: str) -> np.ndarray:
    """Questions answered so far, and batches that took."""
    names = [f'bayeslora_batch_size_{what}{{kind="choices"}}' for what in ("sum", "count")]
    found = dict(line.rsplit(" ", 1) for line in metrics.splitlines())
    return np.array([float(found[name]) for name in names])


def flatness(memory: Sequence[tuple[int, int]], requests: int) -> dict[str, float]:
    """Memory of the server over the second half: where it began, where it ended, its slope in bytes per request."""
    half = np.array([(done, size) for done, size in memory if done >= requests / 2])
    slope = np.polyfit(half[:, 0], half[:, 1], 1)[0] if len(half) > 1 else 0.0
    return {
        "at_half_bytes": int(half[0, 1]),
        "at_end_bytes": int(half[-1, 1]),
        "slope_bytes_per_request": float(slope),
    }


if __name__ == "__main__":
    main()
