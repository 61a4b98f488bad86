"""Read commands of a shell script without running it: words, variables, and which commands start a program in a container.

It covers what launch scripts of model servers use: assignments, arrays, quotes, line continuations, ``bash -c``. What depends
on the machine, such as ``$(nvidia-smi)``, stays as it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise, takewhile

MAX_NESTED = 4
"""Limit for shells within shells."""

_CONTINUED = re.compile(r"(?<![ \t])[ \t]*[\\`^][ \t]*\n")
"""The end of a line that is continued: of POSIX shells, also with blanks that break it there, PowerShell and cmd.exe."""
_FENCED = re.compile(r"^[ \t]*(```|\'{3}|\"{3})[^\n]*\n(.*?)^[ \t]*\1", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"""('[^']*'|"(?:[^"\\]|\\.)*"|\\.)|(?:^|(?<=[\s;&|]))\#[^\n]*""", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r"[$<]\([ \t]*([\w./-]*)[^()\n]*\)|(?<=[\s=\"])`([\w./-]+)[^`\n]*`")
"""The output of a command, of which the name is kept."""
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
"""The start of a here-document."""
_OPENS_SHELL = re.compile(r"(^|[ /])(ba|z|da|a)?sh$|--entrypoint[ =](\S*/)?(ba)?sh ")
_PROMPT = re.compile(r"^[ \t]*(?:\$|>(?! *[^\s-]\S*(?: *2>&1)?[ \t]*&?[ \t]*$)|PS [^>\n]{0,80}>) +", re.MULTILINE)
"""A prompt; ``>`` before a single word is the redirection of a continued line."""
_REDIRECTED = re.compile(r"[0-9]?>&[0-9-]|&>")
_ARRAY = re.compile(
    r"^[ \t]*(?:declare -a |local -a |local )?(\w+)\+?=\(((?:[^()'\"$]|\$\([^()]*\)|\$|'[^']*'|\"[^\"]*\")*)\)", re.MULTILINE
)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|[0-9])(?:\[[@*]\])?(?::?([-+?=])([^{}]*))?\}|([A-Za-z_]\w*))")
OWN_ARGUMENTS = ("$@", "$*", "${@}")
"""The arguments of a script, which is given none."""
_KEYWORDS = frozenset(("then", "do", "else", "if", "while", "!", "{", "(", "time", "exec", "nohup", "command", "sudo"))
_SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ash"))
_STARTERS = frozenset(("ssh", "tmux", "screen", "srun", "su", "eval", "script"))
"""Programs that run the last of their words which has blanks."""


@dataclass
class Shell:
    """What a script has set: its variables and arrays, and those of them that are exported."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    exports_all: bool = False

    def without(self, names: Sequence[str]) -> None:
        """Forget variables."""
        for name in names:
            self.variables.pop(name, None)
            self.exported.pop(name, None)


@dataclass(frozen=True)
class ShellCommand:
    """A command of a script with the variables that it is given."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


def commands(text: str, shell: Shell | None = None, depth: int = 0) -> Iterator[ShellCommand]:
    """The commands of a script, those of ``bash -c`` and ``env`` instead of these.

    Raises:
        ValueError: shells are nested too deeply.
    """
    if depth > MAX_NESTED:
        raise ValueError("shells are nested too deeply")
    shell = shell or Shell()
    text = _code(text)
    for name, content in _ARRAY.findall(text):
        added = (word for each in shlex.split(content, comments=True) for word in _expanded(each, shell))
        shell.arrays[name] = [*shell.arrays.get(name, []), *added]
    for words in _simple(_ARRAY.sub("", text)):
        yield from _command(words, shell, depth)


def _code(text: str) -> str:
    """A script without comments, prompts and redirections, its continued lines joined; of Markdown, the fenced blocks."""
    text = _OUTPUT.sub(lambda match: f"$({match[1] or match[2] or ''})", text.replace("\r\n", "\n"))
    text = "\n".join(match[2] for match in _FENCED.finditer(text)) or text
    text = _COMMENT.sub(lambda match: match[1] or "", _PROMPT.sub("", text))
    text = _REDIRECTED.sub(" ", _CONTINUED.sub(" ", text))
    return "\n".join(_here_documents(text.split("\n")))


def _here_documents(lines: Sequence[str]) -> Iterator[str]:
    """Lines with a here-document for a shell as the script of its ``-c``; others stay, as they can be a script's file."""
    last = {line.strip(): n for n, line in enumerate(lines)}
    rest = enumerate(lines)
    for n, line in rest:
        here = _HERE.search(line)
        words = [word for word in line[: here.start()].split() if word not in ("-", "-s")] if here else []
        if here and last.get(here[2], 0) > n and _OPENS_SHELL.search(" ".join(words)):
            script = []
            while (following := next(rest)[1]).strip() != here[2]:
                script.append(following)
            quoted = shlex.quote("\n".join(script))
            yield f"{' '.join(words)} -c {quoted} {line[here.end() :]}"
        else:
            yield line


def _simple(text: str) -> list[list[str]]:
    """The simple commands of a script; of one with a quotation that does not end, those of the lines without it."""
    try:
        return list(_tokens(text))
    except ValueError:
        found = []
        for line in text.splitlines():
            with suppress(ValueError):
                found += list(_tokens(line))
        return found


def _tokens(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for separates, tokens in groupby(lexer, key=lambda token: bool(token) and not token.strip(";&|\n")):
        if not separates:
            yield list(tokens)


def _command(words: Sequence[str], shell: Shell, depth: int) -> Iterator[ShellCommand]:
    first = len(list(takewhile(_KEYWORDS.__contains__, words)))
    words = [word for n, each in enumerate(words) for word in _expanded(each, shell, first=n == first)]
    while words and words[0] in _KEYWORDS:
        words = words[1:]
        words = words[next((n for n, word in enumerate(words) if not word.startswith("-")), len(words)) :]
    assignments = list(takewhile(_ASSIGNED.fullmatch, words))
    given, words = _assigned(assignments, shell), words[len(assignments) :]
    if not words:
        shell.variables |= given
        shell.exported |= {name: value for name, value in given.items() if shell.exports_all or name in shell.exported}
        return
    if words[0] in ("export", "declare", "local", "readonly"):
        new = _assigned(words[1:], shell)
        named = {word: shell.variables[word] for word in words[1:] if word in shell.variables}
        shell.variables |= new
        shell.exported |= {**new, **named} if words[0] == "export" or "-x" in words else {}
        return
    if words[0] == "unset":
        shell.without(words[1:])
        return
    if words[0] == "set":
        shell.exports_all = words[1:] in (["-a"], ["-o", "allexport"]) or (shell.exports_all and words[1:2] != ["+a"])
        return
    if words[0] == "env":
        removed = [name for option, name in pairwise(words) if option in ("-u", "--unset")]
        inner = Shell({**shell.variables}, shell.arrays, {**shell.exported, **given})
        inner.without(removed)
        yield from _command([word for word in words[1:] if word not in ("-", "-u", "--unset", *removed)], inner, depth)
        return
    if words[1:2] == ["exec"]:  # of docker: the shell in the container
        words = words[next((n for n, word in enumerate(words) if word.rpartition("/")[2] in _SHELLS), 0) :]
    script = inner_script(words)
    if script is not None:
        inner = Shell({**shell.variables, **given}, shell.arrays, {**shell.exported, **given})
        yield from commands(script, inner, depth + 1)
        return
    yield ShellCommand(tuple(_unredirected(words)), {**shell.exported, **given})


def _assigned(words: Sequence[str], shell: Shell) -> dict[str, str]:
    """The variables that words assign or, with ``+=``, lengthen."""
    matches = [match for word in words if (match := _ASSIGNED.fullmatch(word))]
    return {name: shell.variables.get(name, "") * bool(added) + value for name, added, value in (m.groups() for m in matches)}


def inner_script(words: Sequence[str]) -> str | None:
    """The script that ``bash -c``, or a program such as ssh, is given; None for other commands."""
    program = words[0].rpartition("/")[2] if words else ""
    if program in _STARTERS:
        return next((word for word in reversed(words) if re.search(r"\s", word.strip())), None)
    if program not in _SHELLS:
        return None
    option = next((n for n, word in enumerate(words) if re.fullmatch("-[a-z]*c", word)), None)
    return words[option + 1] if option is not None and option + 1 < len(words) else None


def _unredirected(words: Sequence[str]) -> Iterator[str]:
    skip = False
    for word in words:
        if skip or re.fullmatch(r"[0-9]?(>>?|<)(?![^<>]*[^<>]>$)\S*", word):
            skip = not skip and word.endswith((">", "<"))
        else:
            yield word


def _expanded(word: str, shell: Shell, *, first: bool = False) -> Iterator[str]:
    """The words that a word stands for: an array, or a variable with several options, has more than one, ``$@`` none."""
    if word in OWN_ARGUMENTS:
        return
    match = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
    if match and match[1] in shell.arrays:
        yield from shell.arrays[match[1]]
        return
    text = expanded(word, shell.variables)
    if _VARIABLE.fullmatch(word) and text != word and (first or not text or re.match(r"\s*-.*\s", text)):
        yield from shlex.split(text)
    else:
        yield text


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """A text with the values of variables, or their defaults; those without stay."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match[1] or match[4], match[2], match[3]
        known = variables.get(name)
        if operator == "+":
            return word if known else ""
        if known or (known is not None and operator is None):
            return known
        return word if operator in ("-", "=") else "~" if name == "HOME" else match[0]

    return _VARIABLE.sub(value, text)


def unset(words: Sequence[str]) -> list[str]:
    """What in words a shell or a person would have replaced: variables that are not set, output of commands, placeholders."""
    return sorted(
        {match[0] for word in words for match in re.finditer(r"\$\{[^}]*\}|\$[\w@*]+|\$\([^)]*\)?|`[^`]*`|^<[^<>]+>$", word)}
    )
