"""Print the requirements of the extra in argv, for an environment without the package."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib  # pip reads pyproject.toml with it

text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
for requirement in tomllib.loads(text)["project"]["optional-dependencies"][sys.argv[1]]:
    print(requirement)
