"""A page of HTML read back: its text, tables, addresses and elements."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """What a browser would find, without running anything.

    Attributes:
        text: all visible text.
        tables: rows of texts by the table's id.
        facts: names and values of definition lists, in order.
        addresses: of links and of anything else that is fetched.
        ids: how often each id occurs.
        elements: how often each element occurs.
        figures: labels of drawings.
        unclosed: elements that were not closed, or closed in vain.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.facts: list[tuple[str, str]] = []
        self.addresses: list[str] = []
        self.ids: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.figures: list[str] = []
        self.bold: list[str] = []
        self.unclosed: list[str] = []
        self._open: list[str] = []
        self._rows: list[list[str]] | None = None
        self.feed(source)
        self.unclosed += self._open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.elements[tag] += 1
        self.attributes |= set(given)
        if "id" in given:
            self.ids[given["id"]] += 1
        self.addresses += [given[name] for name in ("href", "src", "action", "data") if name in given]
        if tag == "table":
            self._rows = self.tables.setdefault(given["id"], [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "dt":
            self.facts.append(("", ""))
        elif tag == "strong":
            self.bold.append("")
        elif tag == "svg":
            self.figures.append(given["aria-label"])
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            self.unclosed.append(f"/{tag}")

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.text += data
        if "td" in self._open or "th" in self._open:
            small = " " if self._open[-1] == "small" else ""
            self._rows[-1][-1] += small + data
        if "strong" in self._open:
            self.bold[-1] += data
        for place, tag in enumerate(("dt", "dd")):
            if tag in self._open and "svg" not in self._open:
                pair = list(self.facts[-1])
                pair[place] += data
                self.facts[-1] = (pair[0], pair[1])

    def column(self, table: str, title: str) -> dict[str, str]:
        """Cells of a column by the first cell of their row."""
        head, *rows = self.tables[f"table-{table}"]
        at = head.index(title)
        return {row[0]: row[at] for row in rows}


def read_page(directory: Path) -> Page:
    """The page of a report, which must stand alone: no script, no outside address, every element closed, every id once."""
    page = Page((directory / "index.html").read_text(encoding="utf-8"))
    assert not page.unclosed
    assert not {"script", "link", "img", "iframe", "object", "form"} & page.elements.keys()
    assert not any(name.startswith("on") for name in page.attributes)
    assert "http" not in page.source and "@import" not in page.source
    assert all(not address.startswith(("//", "/")) and ":" not in address for address in page.addresses)
    assert all(address[1:] in page.ids for address in page.addresses if address.startswith("#"))
    assert max(page.ids.values()) == 1
    assert page.elements["h1"] == 1 and all(page.figures)
    return page
