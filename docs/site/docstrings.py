"""Docstrings as the reference wants them: theirs says ``Example:``, and ``::`` before a block of code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """griffe knows a section of examples by the plural, and takes the singular for a note."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            value = re.sub(r"::$", ":", value, flags=re.MULTILINE)
            if isinstance(obj, griffe.Function) and obj.returns is not None:  # or the text up to a colon is the type
                value = re.sub(r"^(Returns:\n\s+)", rf"\g<1>{obj.returns}: ", value, flags=re.MULTILINE)
            obj.docstring.value = value
