"""Extension of Griffe for `make docs-site`: docstrings as they read best on a page.

Examples become code, which Griffe does only in a section "Examples"; pages that are named become
links; defaults get the names that scripts use.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)  # up to an empty line
PAGE = re.compile(r"\bdocs/(\w+)\.md(#[\w-]+)?")
NAMES = {"ProcessSet(process_set_id=0": "global_process_set", "NoneCompressor": "Compression.none"}
OPERATIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")  # by number


class Examples(griffe.Extension):
    """Changes of docstrings and signatures."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring before its sections are read, and the signature."""
        if obj.docstring is not None:
            text, heading, rest = obj.docstring.value.partition("Examples\n--------\n")
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
            text = PAGE.sub(lambda page: f"[{page[1]}](../{page[1]}.md{page[2] or ''})", text)
            obj.docstring.value = (
                re.sub(r"(\w)::$", r"\1:", text, flags=re.MULTILINE) + heading + rest
            )
        if isinstance(obj, griffe.Function):
            for each in obj.parameters:
                if each.name == "op" and re.fullmatch(r"\d|<\w+\.\w+: \d>", str(each.default)):
                    number = re.findall(r"\d", str(each.default))[0]
                    each.default = OPERATIONS[int(number)]
                for begin, name in NAMES.items():
                    if str(each.default).startswith(begin):
                        each.default = name
            if str(obj.returns) == "Any":
                obj.returns = None
