"""Names of the requests of a compiled program.

A name must be the same on all ranks, although each of them traces and compiles by itself. It is
that of the program (``jit_step``), of the function that calls the verb, of the verb, and a count
within these, in the order in which JAX lowers the program. JAX may trace a function once and use it
in several programs, or several times in one, so names are given when a program is lowered, not
while it is traced.

A loop sends requests of the same name again and again, and so does a program that runs again. That
is right without a number: XLA begins an iteration when the one before it has ended, and, on one
device, a program when those have ended that the same thread called before.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hororing._requests import names
from hororing.jax._ffi.call import Call


class Program:
    """The names that one lowered program has given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: Counter[str] = Counter()
        self._sites: dict[str, str] = {}

    def name_of(self, call: Call) -> str:
        """Return the name for a call that is lowered now. ValueError for one of another site."""
        if call.name is None:
            function = call.site.partition(" at ")[0]
            what = f"{self._name}/{function}/{call.verb}"
            self._counts[what] += 1
            return f"{what}.{self._counts[what]}"
        names.encode_name(call.name)
        site = self._sites.setdefault(call.name, call.site)
        if site != call.site:
            raise ValueError(
                f"{call.verb}: two calls in {self._name} have the name '{call.name}': in {site}, "
                f"and in {call.site}; both may be in flight at once, so give each its own"
            )
        # JAX repeats a call where it unrolls a loop or computes a value again.
        self._counts[call.name] += 1
        number = self._counts[call.name]
        return call.name if number == 1 else f"{call.name}.{number}"


def program_of(module_context: Any) -> Program:
    """The program that is being lowered."""
    for each in module_context.keepalives:
        if isinstance(each, Program):
            return each
    name = str(module_context.module.operation.attributes["sym_name"]).strip('"')
    program = Program(name)
    module_context.add_keepalive(program)
    return program
