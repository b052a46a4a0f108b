"""The page ``/docs``: the OpenAPI description as plain HTML, which needs no script and nothing from other hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]

HEAD = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>bayeslora: the API</title>
  <link rel="icon" href="/page/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/page/style.css">
  <script src="/page/theme.js"></script>
</head>
<body>
  <header class="top"><div><h1>The API</h1>
    <p class="soft">Also as <a href="/openapi.json">OpenAPI</a>. <a href="/">Back to the page</a></p></div></header>
  <main class="reference">
"""


def api_page(openapi: Schema) -> str:
    """HTML of an OpenAPI description: every endpoint with the fields that it takes and gives."""
    parts = [
        _endpoint(openapi, method.upper(), path, how)
        for path, methods in openapi["paths"].items()
        for method, how in methods.items()
    ]
    return HEAD + "".join(parts) + "  </main>\n</body>\n</html>\n"


def _endpoint(openapi: Schema, method: str, path: str, how: Schema) -> str:
    body = _content(how.get("requestBody", {}))
    given = _content(how["responses"].get("200", {}))
    parts = [f"<h2><code>{method} {escape(path)}</code></h2>", f"<p>{escape(how.get('description', ''))}</p>"]
    if body:
        parts.append(_table(openapi, "Fields of the request", body, asked=True))
    if given:
        parts.append(_table(openapi, "Fields of the reply", given))
    return f'    <section class="card wide">{"".join(parts)}</section>\n'


def _content(holder: Schema) -> Schema:
    """Schema of a JSON body; empty if there is none."""
    found: Schema = holder.get("content", {}).get("application/json", {}).get("schema", {})
    return found


def _table(openapi: Schema, caption: str, schema: Schema, *, asked: bool = False) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(said)}</td></tr>"
        for name, kind, said in _fields(openapi, schema, asked=asked)
    )
    if not rows:
        return ""
    head = "<tr><th scope='col'>Field</th><th scope='col'>Type</th><th scope='col'>Meaning</th></tr>"
    return f"<h3>{caption}</h3><div class='scroll' tabindex='0'><table>{head}{rows}</table></div>"


def _fields(
    openapi: Schema, schema: Schema, prefix: str = "", above: tuple[str, ...] = (), *, asked: bool
) -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of all fields, with those of objects within them after their own."""
    name, schema = _resolved(openapi, schema)
    if name in above:
        return
    required = schema.get("required", ())
    for field, how in schema.get("properties", {}).items():
        said = [how.get("description", ""), "Required." if field in required and asked else ""]
        yield prefix + field, _kind(openapi, how), " ".join(filter(None, said))
        for option in how.get("anyOf", [how]):
            inner, dots = (option["items"], "[].") if "items" in option else (option, ".")
            yield from _fields(openapi, inner, prefix + field + dots, (*above, name) if name else above, asked=asked)


def _resolved(openapi: Schema, schema: Schema) -> tuple[str, Schema]:
    """Name and content of a schema that may be a reference."""
    if "$ref" not in schema:
        return "", schema
    name = schema["$ref"].rsplit("/", 1)[-1]
    return name, openapi["components"]["schemas"][name]


def _kind(openapi: Schema, how: Schema) -> str:
    """Type of a field in a few words, with its bounds."""
    options = [option for option in how.get("anyOf", [how]) if option.get("type") != "null"]
    return " or ".join(dict.fromkeys(_one_kind(openapi, option) for option in options)) or "null"


def _one_kind(openapi: Schema, how: Schema) -> str:
    _, how = _resolved(openapi, how)
    if "items" in how:
        return f"list of {_kind(openapi, how['items'])}"
    if "enum" in how or "const" in how:
        return " or ".join(json.dumps(value) for value in how.get("enum", [how.get("const")]))
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    return ", ".join([how.get("type", "any"), *(f"{sign} {how[bound]:g}" for bound, sign in bounds if bound in how)])
