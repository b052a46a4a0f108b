"""The documentation is true: its Python runs, its commands exist, its links lead somewhere. For its figures see
``benchmarks/checks``."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bayeslora import cli, posterior
from tasks.cases import write_lines
from tiers import some
from train import tiny

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "benchmarks/reports"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(REPORTS.glob("*.md")),
]
RUNNABLE = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
SHELL = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+?)(?:#[^)]*)?\)")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
RUN_NOTEBOOK = runpy.run_path(str(ROOT / "tools/run_notebook.py"))
LIMIT = 120_000
"""Bytes of a picture."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_readme(page: Path) -> bool:
    return page.name == "README.md"


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of all complete calls of the command line: without shell variables, gaps and files of settings."""
    for block in SHELL.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            starts = [k + 1 for k, word in enumerate(words) if word == "bayeslora" and (k == 0 or words[k - 1] == "-m")]
            if starts and "$" not in line and not {"...", "--config"} & set(words):
                yield words[starts[0] :]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with questions in it."""
    write_lines(tmp_path / "questions.jsonl", [tiny.question(k) for k in range(80)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page", some([page for page in PAGES if "<!-- run -->" in page.read_text(encoding="utf-8")], is_readme), ids=name
)
def test_python_runs(page: Path, desk: Path) -> None:
    blocks = RUNNABLE.findall(page.read_text(encoding="utf-8"))
    if page.stem == "calibrate-and-deploy":  # begins with a run
        assert tiny.bayeslora(*tiny.options(desk / "my-run")) == 0
    for block in blocks:
        source = block.replace('"smollm2"', repr(tiny.model_directory())).replace("last:8", "last:2")
        exec(compile(source, name(page), "exec"), {})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_are_whole_and_hold_no_output(notebook: Path) -> None:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5) and 8 <= len(content["cells"]) <= 14
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", it) for it in ids)
    for cell in content["cells"]:
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | (
            {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        )
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.system
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_run(notebook: Path, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = notebook.read_text(encoding="utf-8").replace(
        '\\"smollm2\\"', json.dumps(json.dumps(tiny.model_directory()))[1:-1]
    )
    (desk / "copy.ipynb").write_text(text, encoding="utf-8")
    assert RUN_NOTEBOOK["main"]([str(desk / "copy.ipynb")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"copy.ipynb:ask\nAnswer\('(red|blue)', confidence 0\.\d+, epistemic", shown)
    assert "Figure(" in shown and re.search(r"copy.ipynb:save\n(.*\n)*tensor\(\[", shown)


@pytest.mark.parametrize("page", some([page for page in PAGES if list(commands(page))], is_readme), ids=name)
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        known = (
            ["--model", "smollm2", "--task", "urns"] if "--start-from" in words else []
        )  # the run that is named says them
        cli.parse([*words[:1], *known, *words[1:]])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link can lead to within a page, as GitHub names it."""
    headings = HEADING.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(REPORTS.glob("*.md")), ids=name)
def test_links_of_reports_lead_to_sections(page: Path) -> None:
    for target, section in ANCHOR.findall(page.read_text(encoding="utf-8")):
        assert section in anchors(page.parent / target if target else page), f"{name(page)}: {target}#{section}"


def test_all_reports_are_listed() -> None:
    listed = LINK.findall((REPORTS / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in REPORTS.glob("*.md")} - {"README.md"} <= set(listed)


def test_results_are_short() -> None:
    assert len((ROOT / "docs/results.md").read_text(encoding="utf-8").split()) <= 800


def test_pictures_are_small_and_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (ROOT / "docs/pictures").iterdir():
        assert f"pictures/{picture.name}" in text
        assert picture.stat().st_size < LIMIT, picture.name


def test_badges_are_true(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "docs/badges.py"))["draw_badges"](tmp_path)
    drawn = {it.name: it.read_text(encoding="utf-8") for it in tmp_path.iterdir()}
    assert drawn == {it.name: it.read_text(encoding="utf-8") for it in (ROOT / "docs/pictures").glob("badge-*.svg")}
    assert "3.11 or newer" in drawn["badge-python.svg"] and "Apache-2.0" in drawn["badge-licence.svg"]


def test_reference_of_posteriors_is_complete() -> None:
    listed = re.findall(
        r"^\.\. (?:auto\w+|py:data):: (\w+)$",
        (ROOT / "docs/api/posterior.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert sorted(listed) == sorted(posterior.__all__)
