"""Adapt docstrings to griffe: it expects ``Examples:``, and a colon before a block of code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rename ``Example:``, which griffe takes for a note, link pages, and give each function's result its type."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            value = re.sub(r"::$", ":", value, flags=re.MULTILINE)
            value = re.sub(r"\(docs/(\w+)\.md\)", r"([more](\1.md))", value)
            if isinstance(obj, griffe.Function) and obj.returns is not None:
                value = re.sub(r"^(Returns:\n\s+)", rf"\g<1>{obj.returns}: ", value, flags=re.MULTILINE)
            obj.docstring.value = value
