"""Formulas as MathML, made by docutils at build time: pages need no script and no network to show them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def visit_inline(translator: Any, node: nodes.math) -> None:
    """A formula within a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """A formula of its own, with its number at the right if it has one."""
    translator.body.append(translator.starttag(node, "div", CLASS="formula"))
    translator.body.append(tex2mathml(node.astext(), as_block=True))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({node["number"]})</span>')
    translator.body.append("</div>")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("presentation_math", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True}
