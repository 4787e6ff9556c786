"""Completion of hororun, horovodrun and hororing in a shell: `hororing completion bash`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

from hororing.hororun import command

SHELLS = ("bash", "zsh", "fish")

# After a word that is no flag, the words of the program follow: files, as everywhere.
_BASH = """\
_hororun() {{
    local word first=${{COMP_WORDS[1]}} current=${{COMP_WORDS[COMP_CWORD]}}
    COMPREPLY=()
    case $1 in
    hororing)
        if (( COMP_CWORD == 1 )); then word="{commands}"; else case $first in
{cases}
        esac; fi ;;
    *) word="{flags}" ;;
    esac
    if [[ $current == -* || ( $1 == hororing && $COMP_CWORD == 1 ) ]]; then
        COMPREPLY=($(compgen -W "$word" -- "$current"))
    elif [[ $1 != hororing ]]; then
        COMPREPLY=($(compgen -c -f -- "$current"))
    fi
}}
complete -o default -F _hororun hororun horovodrun hororing
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = 'bash, zsh: eval "$(hororing completion bash)"; fish: ... | source'
    parser.add_argument("shell", choices=SHELLS)


def script(shell: str, modules: Mapping[str, str | None]) -> str:
    """Return the script for a shell.

    Parameters
    ----------
    shell : str
        One of `SHELLS`.
    modules : Mapping
        By command of `hororing`: the module with its `add_arguments`. None: it has none.
    """
    flags = _flags(command.arguments_parser())
    of_commands = {name: _flags_of(module) for name, module in modules.items()}
    if shell == "fish":
        lines = [f"complete -c {each} -a '{' '.join(flags)}' -n 'string match -q -- \"-*\" "
                 "(commandline -ct)'" for each in ("hororun", "horovodrun")]  # fmt: skip
        lines.append(
            f"complete -c hororing -f -n __fish_use_subcommand -a '{' '.join(of_commands)}'"
        )
        lines += [
            f"complete -c hororing -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'"
            for name, words in of_commands.items()
            if words
        ]
        return "\n".join(lines) + "\n"
    cases = "\n".join(
        f'        {name}) word="{" ".join(words)}" ;;' for name, words in of_commands.items()
    )
    text = _BASH.format(commands=" ".join(of_commands), cases=cases, flags=" ".join(flags))
    return (_ZSH if shell == "zsh" else "") + text


def _flags_of(module: str | None) -> list[str]:
    if module is None:
        return []
    parser = argparse.ArgumentParser()
    try:
        importlib.import_module(module).add_arguments(parser)
    except ImportError:  # an optional package is missing: the command itself says which
        return []
    return _flags(parser)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(
        option
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
        if option.startswith("--")
    )
