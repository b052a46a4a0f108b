"""How ``--help`` shows an option: its docstring as running text, the kind of value without ``None``, a default if there is one.

tyro keeps the line breaks of docstrings, and shows ``{None}|INT`` and ``(default: None)`` where an option may be left out. So the
annotations of a verb say for a while how its options are shown.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

KINDS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


@contextmanager
def plain_help(verb: type) -> Iterator[None]:
    """Inside the block, the help of a verb is plain."""
    kept = {owner: inspect.get_annotations(owner) for owner in dataclasses_of(verb)}
    try:
        for owner, annotations in kept.items():
            owner.__annotations__ = _shown(owner, annotations)
        yield
    finally:
        for owner, annotations in kept.items():
            owner.__annotations__ = annotations


@contextmanager
def short_descriptions(verbs: Collection[type]) -> Iterator[None]:
    """Inside the block, only the first paragraph of the verbs' docstrings is shown."""
    kept = {verb: verb.__doc__ or "" for verb in verbs}
    try:
        for verb, text in kept.items():
            verb.__doc__ = text.partition("\n\n")[0]
        yield
    finally:
        for verb, text in kept.items():
            verb.__doc__ = text


def dataclasses_of(cls: type) -> list[type]:
    """A dataclass, what it inherits from, and the dataclasses of their fields."""
    found = [owner for owner in cls.__mro__ if is_dataclass(owner)]
    for hint in get_type_hints(cls).values():
        if is_dataclass(hint) and isinstance(hint, type):
            found += dataclasses_of(hint)
    return list(dict.fromkeys(found))


def _shown(owner: type, annotations: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of a dataclass, with how options are shown."""
    texts, hints = _docstrings(owner), get_type_hints(owner, include_extras=True)
    found = dict(annotations)
    for name in annotations:
        hint = hints[name]
        if not is_dataclass(_bare(hint)):
            shown = tyro.conf.arg(help=texts.get(name), metavar=_optional_kind(hint), help_behavior_hint=_default)
            found[name] = Annotated[hint, shown]
    return found


def _docstrings(owner: type) -> dict[str, str]:
    """The docstring below each field of a class, on one line; none where there is no source."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except OSError:
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                found[name] = " ".join(text.split())
    return found


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _optional_kind(hint: Any) -> str | None:
    """What is shown for the value of an option that may be left out; ``None`` for what tyro shows."""
    kinds = [it for it in get_args(hint) if it is not NoneType]
    if get_origin(hint) not in (Union, UnionType) or len(kinds) != 1:
        return None
    kind, parts = kinds[0], get_args(kinds[0])
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, parts))}}}"
    if get_origin(kind) is tuple and parts[1:] == (...,) and parts[0] in KINDS:
        return f"[{KINDS[parts[0]]} [{KINDS[parts[0]]} ...]]"
    return KINDS.get(kind)


def _default(value: str) -> str:
    return "" if value in ("", "''", "None", "False") else f"(default: {value})"
