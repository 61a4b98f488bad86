"""Mask secrets where a text leaves the program: on a terminal, in a result, a record, a log file or the text of an issue.

A secret that the program read is masked **by value** wherever it occurs: call :func:`register` where it is read. The secrets of
others, in logs and in answers of servers, are masked by their **form**. :func:`masked` does both; no other function decides
what a secret is. A text for strangers is :func:`anonymous` as well: without home directories and addresses.
"""

import html
import ipaddress
import json
import re
import threading
from collections.abc import Callable, Mapping
from urllib.parse import quote, quote_plus, unquote, urlsplit

REDACTED = "***"

SHORTEST = 4
"""Characters of a secret below which masking it would remove parts of words."""
_WHOLE = 8
"""Characters below which a secret is masked only where no letter or digit is beside it."""
_ORDINARY = frozenset({"empty", "none", "null", "dummy", "true", "false", "token", "password", "secret", "changeme"})
"""Values that servers without authentication are given instead of a key, in lower case."""
_NAMED = re.compile(
    r"(?:^|[_-])(?:api[_-]?keys?|token|passw(?:or)?d|pass|passphrase|pwd|secret|credentials?|auth|cookie|jwt"
    r"|(?:access|secret|private|auth)[_-]?key|key[_-]id|key)(?:[_-]?\d+)?$",
    re.IGNORECASE,
)
"""Names of environment variables and headers whose values are secrets."""


_USER = re.compile(
    r"(://|https?:/)(?:"  # a path library makes one slash of two
    r"[^\s/?#@\"'<>\\]{0,512}+@"  # up to the last @ before the path
    r"|[^\s/:@\[\"'<>\\]{1,128}+:(?!\d{1,5}(?:[/?#\"'<>\\\s]|$))[^\s@\"'<>\\]{1,512}+@"  # a password with a bare / ? or #
    r")+"
)
_PARAMETER = re.compile(r"([?&;#])([^\s=&;#?\"'<>\\]{1,64}+)=([^\s&;#\"'<>\\]+)")
_GRANTS_ACCESS = re.compile(r"token|key|secret|sig|pass|pwd|auth|cred|session|jwt|code", re.IGNORECASE)
"""In the name of a query parameter, such as ``X-Amz-Signature`` or ``access_token``."""


def redacted(text: str) -> str:
    """A URL, or a text with URLs, without user names, passwords and values of query parameters that grant access.

    A part of :func:`masked`, and the check that a recipe's URL has none.
    """
    return _PARAMETER.sub(_parameter, _USER.sub(r"\1", text))


def _parameter(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}={REDACTED}" if _GRANTS_ACCESS.search(match[2]) else match[0]


class _Known:
    """The values that are masked wherever they occur."""

    def __init__(self) -> None:
        self._forms: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self._lock = threading.Lock()

    def add(self, secret: str) -> None:
        if len(secret) < SHORTEST or secret.lower() in _ORDINARY:
            return
        forms = {secret, quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1], html.escape(secret)}
        with self._lock:
            if not forms <= self._forms:
                self._forms |= forms
                longest_first = sorted(self._forms, key=lambda form: (-len(form), form))
                self._pattern = re.compile("|".join(map(_occurrence, longest_first)))

    def masked(self, text: str) -> str:
        return self._pattern.sub(REDACTED, text) if self._pattern else text


def _occurrence(form: str) -> str:
    literal = re.escape(form)
    return literal if len(form) >= _WHOLE else rf"(?<![A-Za-z0-9]){literal}(?![A-Za-z0-9])"


_known = _Known()


def register(*secrets: str) -> None:
    """Mask these values from now on, also percent-encoded, in JSON and in HTML. Fewer than four characters are ignored."""
    for secret in secrets:
        _known.add(secret)


def register_url(url: str) -> None:
    """Register the password of a URL, and the values of its query parameters that grant access."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    register(password, unquote(password))
    for parameter in re.split("[&;]", parts.query):
        name, _, value = parameter.partition("=")
        if _GRANTS_ACCESS.search(name) or not value:
            register(value or name, unquote(value or name))


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret: ``HF_TOKEN``, ``*_API_KEY`` and the like."""
    return bool(_NAMED.search(name))


def register_header(name: str, value: str) -> None:
    """Register what a header of a request grants access with, such as the key in ``Authorization: Bearer KEY``."""
    if _NAMED.search(name) or name.lower().endswith("authorization"):
        register(value, value.partition(" ")[2])


def register_environment(environment: Mapping[str, str]) -> None:
    """Register the secrets in environment variables: ``HF_TOKEN``, ``*_API_KEY`` and the like, and URLs with passwords."""
    for name, value in environment.items():
        if "://" in value:
            register_url(value)
        elif _NAMED.search(name) and not value.startswith(("/", "~", ".")):
            register(value)


def masked(text: str) -> str:
    """A text without secrets: the registered values, credentials in URLs, and what has the form of a secret.

    Names of options, files and variables, and numbers that are compared with, stay: ``num_tokens == 0``, ``hf_config.json``.
    """
    text = redacted(_known.masked(text))
    for needles, pattern, replacement in _FORMS:
        if any(needle in text for needle in needles) or not needles:
            text = pattern.sub(replacement, text)
    return text


def masked_json(document: str) -> str:
    """A JSON document with its strings masked; it stays one, whatever they contain."""
    return _STRING.sub(lambda string: _masked_string(string[0]), document)


def _masked_string(literal: str) -> str:
    text = json.loads(literal)
    shown = masked(text)
    return literal if shown == text else json.dumps(shown)


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')

_BARE = r"[^\s,'\"\[\](){}<>&|;\\`]"
"""Characters of a value without quotation marks."""
_VALUES = (
    r"(?P<values>\[[^\]\n]{1,2000}\]|(?P<mark>\\?['\"])(?:[^'\"\\\n]|\\(?!['\"])){1,2000}"
    rf"|{_BARE}+(?:,{_BARE}+(?![^\s,'\"\])}}]))*(?:, (?=\S*\d){_BARE}{{12,}})*)"
)
"""A value, or several: a list of Python, or separated by commas. The closing quotation mark is no part of it."""
_ASSIGNED = re.compile(
    r"(?P<keyword>(?<!/)(?:api[_ -]?keys?|(?:access|private|auth|signing)[_-]?key(?:[_-]?id)?"
    r"|secret(?:[_-](?:access[_-])?key(?:_base)?|[_-]id)?s?|(?-i:(?<=[A-Z\d]_)(?:PASS|PAT))"
    r"|token|passw(?:or)?d|passphrase|pwd|credentials?))(?:[_-]?\d{1,3})?"
    r"(?P<sign>\\?['\"]?\s{0,3}(?::=?|=>?(?!=)|(?<=s )(?=\[))\s{0,3})" + _VALUES,
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(?P<keyword>(?<![\w-])--[\w-]{0,40}?(?:api-keys?|token|password|passwd|secret|credentials?|access-key))"
    r"(?P<sign>['\"]?,?\s{1,4})(?P<values>['\"]?[^\s'\"]+['\"]?(?:,? ['\"]?(?=\S*\d)(?!--)[^\s'\"]{8,}['\"]?)*)"
)
_TOKENS_OF_TEXT = re.compile(
    r"(?:pad|eos|bos|eot|unk|sep|cls|mask|image|audio|video|next|last|first|stop|think|special|start|end|per|draft|new|max|min"
    r"|num|bonus|prev|current|output|input|prompt|unexpected|invalid)[ _-]$|\w+s[_-]$",
    re.IGNORECASE,
)
"""What precedes "token" where a token is a part of a text."""
_WORDS = re.compile(
    r"none|null|nil|true|false|cannot|could|does|it|str|string|int|bool|any|empty|optional.*|list|dict|required|missing|invalid|unset|set|not|is|are"
    r"|was|must|may|can|to|of|or|and|for|with|without|in|on|the|an?|from|by|if|as|that|which|has|option|value|options?|field"
    r"|authentication|header|headers|file|only|given|named?|tokens?|keys?|passwords?|env\w*|os\.environ.*|getenv.*|self\..*"
    r"|args\..*|config\..*|(?-i:@?[A-Z][A-Z_]*)|\*+|\.+|[<${%].*|\d{1,9}\.?",
    re.IGNORECASE,
)
"""Values that are no secrets: words of sentences and types, placeholders, expressions, small numbers."""
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|(?i:none|null|true|false|empty|str|string|any)|\*+|\.{2,}|[<${%].*")


def _assigned(match: re.Match[str]) -> str:
    keyword, values = match["keyword"].lower().lstrip("-"), match["values"]
    value = values.strip("[]'\"\\ ")
    strong = "key" in keyword or "pass" in keyword or "secret" in keyword
    harmless = bool((_PLACEHOLDER if strong and "=" in match["sign"] else _WORDS).fullmatch(value))
    if not strong:
        before = match.string[max(0, match.start() - 16) : match.start()]
        harmless |= bool(_TOKENS_OF_TEXT.search(before)) or value.startswith(("/", "~")) or len(value) < SHORTEST
        sentence = ":" in match["sign"] and not before.endswith(("_", "-"))
        harmless |= sentence and not (any(map(str.isdigit, value)) or len(value) >= 20)
    if harmless or not value:
        return match[0]
    return f"{match.string[match.start() : match.start('values')]}{_without_values(values)}"


def _option(match: re.Match[str]) -> str:
    value = match["values"].strip("'\",.;:)")
    if _WORDS.fullmatch(value) or _TOKENS_OF_TEXT.search(match["keyword"][:-5]):
        return match[0]
    return f"{match['keyword']}{match['sign']}{_without_values(match['values'])}"


def _without_values(values: str) -> str:
    """``***`` in the quotation marks and brackets of one or more values."""
    if values.startswith("["):
        return re.sub(r"[^\s,'\"\[\]]+", REDACTED, values)
    opening = re.match(r"\\?['\"]?", values)
    closing = re.search(r"['\"]?$", values)
    return f"{opening[0] if opening else ''}{REDACTED}{closing[0] if closing else ''}"


def _credential(match: re.Match[str]) -> str:
    return match[0] if _WORDS.fullmatch(match[2]) else f"{match[1]}{REDACTED}"


def _user(match: re.Match[str]) -> str:
    """The credentials of ``curl -u``; a numeric user and group, as of ``docker run``, is none."""
    return match[0] if re.fullmatch(r"[\d:]*|\$.*", match[2]) else f"{match[1]}{REDACTED}"


_Replacement = str | Callable[[re.Match[str]], str]
_FORMS: tuple[tuple[tuple[str, ...], re.Pattern[str], _Replacement], ...] = (
    (("PRIVATE KEY",), re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:(?=-----END)|\Z)", re.DOTALL), rf"\1{REDACTED}"),
    (("hf_", "gsk_"), re.compile(r"\b(?:hf|gsk)_(?:(?=[A-Za-z]{0,60}\d)[A-Za-z0-9]{8,}|[A-Za-z]{20,})(?![\w.]\w)"), REDACTED),
    (("sk-", "k_"), re.compile(r"(?<![\w-])(?:sk-(?=[\w-]{0,60}[0-9A-Z])|[srp]k_(?:live|test)_)[\w-]{8,}"), REDACTED),
    (
        (),
        re.compile(r"\b(?:gh[opsur]_|github_pat_|glpat-|nvapi-|xox[abeprs]-|npm_|pypi-|dckr_pat_|AIza|r8_)[\w-]{16,}"),
        REDACTED,
    ),
    (("AKIA", "ASIA"), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}"), REDACTED),
    (("eyJ",), re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), REDACTED),
    ((), re.compile(r"(?i)\b((?:set-)?cookie['\"]?\s{0,3}:\s{0,3}['\"]?)(?![$<{])[^\n'\"]+"), rf"\1{REDACTED}"),
    ((), re.compile(r"(?i)(\bbearer[ \t]+)((?!\*\*\*)[^\s'\"\\,;<>()]+)"), _credential),
    ((), re.compile(r"(?i)(\bbasic[ \t]+)((?-i:(?=\w*[0-9=]|\w[a-z]*[A-Z])[\w+/-]{6,}=*))"), _credential),
    ((), re.compile(r"(?i)(\bauthorization['\"]?\s{0,3}[:=]\s{0,3}['\"]?digest[ \t])[^\n]+"), rf"\1{REDACTED}"),
    (
        (),
        re.compile(r"(?i)(\b(?:proxy-)?authorization['\"]?\s{0,3}[:=]\s{0,3}['\"]?(?!bearer|basic|digest))([^\s'\",]+)"),
        _credential,
    ),
    (
        (),
        re.compile(r"(?i)(\bx-(?:[\w-]{1,30}-)?(?:key|token|secret|auth)['\"]?\s{0,3}:\s{0,3}['\"]?)([^\s'\",]+)"),
        _credential,
    ),
    ((), _ASSIGNED, _assigned),
    (("--",), _OPTION, _option),
    (("curl", "wget"), re.compile(r"((?:^|\s)(?:-\w{0,8}[uU]|--(?:proxy-)?user)(?:\s+|=)?['\"]?)([^\s'\"]+)"), _user),
    (("curl",), re.compile(r"((?:^|\s)(?:-b|--cookie)(?:\s+|=))(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"]+)"), rf"\1{REDACTED}"),
    (
        ("sshpass", "login"),
        re.compile(r"(\b(?:sshpass|login\b[^\n]{0,200}?)\s(?:-p|--password)[ =]?['\"]?)([^\s'\"-][^\s'\"]*)"),
        _credential,
    ),
    (
        ("mysql", "mariadb"),
        re.compile(r"(\b(?:mysql|mariadb)[\w-]{0,20}\b[^\n]{0,200}?\s-p)(?!ort\b)([^\s'\"]+)"),
        rf"\1{REDACTED}",
    ),
    (("redis-cli",), re.compile(r"(\bredis-cli\b[^\n]{0,200}?\s-a[ =]?['\"]?)([^\s'\"]+)"), rf"\1{REDACTED}"),
    (("pass:",), re.compile(r"(\s-pass(?:in|out)?[ =]['\"]?pass:)([^\s'\"]+)"), rf"\1{REDACTED}"),
    (
        ("hooks", "webhook", "/bot"),
        re.compile(
            r"(\b(?:hooks\.slack\.com/\w{1,20}/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot(?=\d)))\w[\w/:-]*"
        ),
        rf"\1{REDACTED}",
    ),
    ((), re.compile(r"(?i)((?<![/\w.-])passwd[ \t]+)(?!-)([^\s'\",;:]+)"), _credential),
    (
        (),
        re.compile(
            r"(?i)(\b(?:password|passphrase|api[ _-]?key|secret|token)[ \t]+(?:(?:is|was)[ \t]+)?['\"]?)"
            r"(?=[^\s'\"]*\d)([^\s'\",;:/]{6,})"
        ),
        _credential,
    ),
    (
        ("@",),
        re.compile(r"(?<![\w./:@-])([\w.+-]{1,64}:)[^\s@/:'\"]{1,128}@(?!sha\d+:)(?=[\w-]+(?:\.[\w-]+)*(?::\d|[/\s'\"]|$))"),
        r"\1***@",
    ),
)
"""Forms of secrets: strings of which a text has one, if any, an expression, and what it becomes. Each takes linear time."""


def _address(match: re.Match[str]) -> str:
    try:
        address = ipaddress.IPv6Address(match[0].partition("%")[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "ADDRESS"


_NAMES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?:/[\w.-]+)?(?:/homes?|/Users|[A-Za-z]:\\+Users)[/\\]+[^/\\\s:'\",;)\]]+|/root(?=[/\s'\"]|$)"), "~"),
    (re.compile(r"(/(?:users|people|staff|media|scratch|netscratch|u)/)[A-Za-z_][\w.-]*(?=[/\s'\":,;)\]]|$)"), r"\1USER"),
    (re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]+\.[\w.]+\b"), "USER@HOST"),
    (re.compile(r"(?<![\w.-])[\w.-]{1,64}@[\w.-]+(?=:[~/])"), "USER@HOST"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE), "MAC"),
    (
        re.compile(r"(?<![\w.=-])(?<!version )(?!(?:127(?:\.\d+){3}|0\.0\.0\.0)\b)(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)"),
        "ADDRESS",
    ),
    (re.compile(r"(?<![\w:.])(?=[0-9a-fA-F]{0,4}:)[0-9a-fA-F:]{2,39}(?:%\w+)?(?![\w:])"), _address),
)


def anonymous(text: str) -> str:
    """A text without secrets, home directories, names of users below other roots, and addresses of mail and machines."""
    text = masked(text)
    for pattern, replacement in _NAMES:
        text = pattern.sub(replacement, text)
    return text
