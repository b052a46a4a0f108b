"""tyro's error messages in one line.

tyro prints a box and exits. Its hook for errors as objects is private and not in all versions that we support, so the text is
what we work on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_TYRO_WORDS = {
    r"Error parsing __tyro-dummy-inner__\S*: ": "",
    r"Error parsing (-\S+): ": r"\1: ",
    r"no type matching \{None\}\|(.+?) could be instantiated from \[(.*?)\]\. Got errors: .*?;": r"\2 is not \1 ;",
    r"is not \{?\[(\w+) \[\w+ \.\.\.\]\]\}?": r"is not \1",
    r"(-[\w-]+) \[(\w+) \[\w+ \.\.\.\]\]": r"\1 \2 ...",
    r"Could not find valid parse for arguments: \[(.*?)\]": r"\1 cannot be read",
    r"invalid literal for int\(\) with base 10: ('.*?')": r"\1 is not INT",
    r"could not convert string to float: ('.*?')": r"\1 is not FLOAT",
    r" ?; Argument helptext: .*(?=; For full helptext)": "",
    r"invalid choice (.+?) for argument '(-\S+)'\. Expected one of \((.*?)\) ?\.": r"\2: \1 is not one of \3",
    r"Missing value for argument '(-\S+)'\. Expected 1 values\.": r"\1 needs a value",
    r"Missing from bayeslora( \w+)?: ": "missing: ",
    r" \(required\)": "",
    r"Unrecognized or misplaced options: (-[\w-]+) \(applied to bayeslora (\w+)\).*; Perhaps you meant: \1\b.*(?=; For full)": (
        r"\1 is no option of \2"
    ),
    r"Unrecognized (?:or misplaced )?options: ": "unknown: ",
    r" \(applied to bayeslora \w+\)": "",
    r" Arguments are applied to the directly preceding subcommand, so ordering can matter\.": "",
    r"Perhaps you meant: (-[\w-]+).*(?=; For full helptext)": r"did you mean \1?",
    r"(is not one of .*?)'None', ": r"\1",
    r"For full helptext, (?:see|run:?) ": "see ",
}
"""Replacements for phrases in tyro's messages that name its internals or those of Python, or say more than what is wrong."""


def one_line(box: str) -> str:
    """The text of a tyro box without its title. A horizontal rule, of dashes if stdout is not UTF-8, becomes a semicolon."""
    sections: list[list[str]] = [[]]
    for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]:
        content = row.strip("│╭╮╰╯").rstrip()
        if content and set(content.strip()) <= set("─-"):
            sections.append([])
        elif content:
            sections[-1].append(content)
    text = "; ".join(_joined(section) for section in sections if section)
    for pattern, plain in _TYRO_WORDS.items():
        text = re.sub(pattern, plain, text)
    return text.replace(" ;", ";").strip("; ")


def with_initials(message: str, options: Iterable[str]) -> str:
    """The message about an unknown option, with the option whose initials it is: ``--learning-rate`` for ``--lr``."""
    given = re.search(r"unknown: --(\w{2,})", message)
    short: dict[str, str] = {}
    for name in options:
        short.setdefault("".join(word[0] for word in name.split("-")), name)
    if given is None or given[1] not in short:
        return message
    return re.sub(r"(; did you mean \S+)?; see ", f"; did you mean --{short[given[1]]}?; see ", message)


def _joined(section: Sequence[str]) -> str:
    """The rows of a section in one; of missing options the names alone, without their help, which is indented deeper."""
    heading, *rest = section
    if rest and heading.strip().startswith("Missing from "):
        rest = [", ".join(row.strip() for row in rest if _indent(row) <= _indent(rest[0]))]
    return " ".join(row.strip() for row in (heading, *rest))


def _indent(row: str) -> int:
    return len(row) - len(row.lstrip())
