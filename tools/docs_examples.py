"""Extension of Griffe for `make docs-site`: examples in docstrings are shown as code.

Griffe does so in a section "Examples"; elsewhere `>>>` would become quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)  # up to an empty line


class Examples(griffe.Extension):
    """Fences around examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around the examples before the sections."""
        if obj.docstring is not None:
            text, heading, rest = obj.docstring.value.partition("Examples\n--------\n")
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text) + heading + rest
