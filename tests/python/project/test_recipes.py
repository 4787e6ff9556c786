"""The recipes of docs/pytorch.md run unchanged, and leave the same weights on all ranks.

Push tier: 2 s in the session of torch.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import session

PAGE = Path(__file__).parents[3] / "docs/pytorch.md"
CODE = r"^```python\n(.*?)^```$"


def recipes() -> dict[str, str]:
    """Return the code of each recipe, by the name of its case."""
    page = PAGE.read_text("utf-8").partition("\n## Recipes\n")[2].partition("\n## ")[0]
    sections = re.split(r"^### (.*)$", page, flags=re.MULTILINE)
    begin = "".join(re.findall(CODE, sections[0], re.S | re.M))
    return {
        re.sub(r"\W+", "_", title.lower()): begin + code
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
        for code in re.findall(CODE, text, re.S | re.M)
    }


def case(name: str, code: str) -> Callable[[], None]:
    def run() -> None:
        import hororing.torch as hvd

        space: dict[str, Any] = {}
        before = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # for files
            try:
                exec(compile(code, f"{PAGE.name}: {name}", "exec"), space)
            finally:
                os.chdir(before)
        weights = [each.detach().numpy() for each in space["model"].parameters()]
        for rank, theirs in enumerate(hvd.allgather_object(weights)):
            for one, other in zip(weights, theirs, strict=True):
                np.testing.assert_array_equal(one, other, f"{name}: weights of rank {rank}")

    return run


for _name, _code in recipes().items():
    globals()[f"case_{_name}"] = case(_name, _code)

test_case = session.on_ranks(globals(), 2, 3, session="torch")


def test_the_page_has_its_recipes() -> None:
    assert len(recipes()) > 10
