"""Secrets are masked by value and by form, and nothing else is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sm120kit.core import console, secrets
from sm120kit.core.record_files import write_record
from sm120kit.core.secrets import anonymous, masked

FORMS = {
    "HF_TOKEN=hf_abcdefghijklmnop123": "HF_TOKEN=***",
    "hf_token='swordfish'": "hf_token='***'",
    "AWS_SECRET_ACCESS_KEY=abc/def AKIAIOSFODNN7EXAMPLE": "AWS_SECRET_ACCESS_KEY=*** ***",
    "AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE": "AWS_ACCESS_KEY_ID=***",
    "VLLM_API_KEY=3f9a0c7be1d24f5a api_key='9f9a0c7b'": "VLLM_API_KEY=*** api_key='***'",
    "password=12345678 DB_PASSWORD: 1st": "password=*** DB_PASSWORD: ***",
    "args: {'api_key': ['open-sesame', '2nd'], 'port': 8000}": "args: {'api_key': ['***', '***'], 'port': 8000}",
    "VLLM_API_KEY=first,second vllm": "VLLM_API_KEY=*** vllm",
    "--api-key open-sesame --port 1": "--api-key *** --port 1",
    "--api-key first,second --port 1": "--api-key *** --port 1",
    "--api-key k1first99 k2second99 --port 1": "--api-key *** --port 1",
    '["--api-key", "swordfish", "--port", "1"]': '["--api-key", "***", "--port", "1"]',
    '{"a": "{\\"api_key\\": \\"swordfish\\"}"}': '{"a": "{\\"api_key\\": \\"***\\"}"}',
    "Authorization: Bearer abcdef123456": "Authorization: Bearer ***",
    "Proxy-Authorization: Basic dXNlcjpwdw==": "Proxy-Authorization: Basic ***",
    "X-Api-Key: swordfish": "X-Api-Key: ***",
    "invalid key sk-proj-abc123def456": "invalid key ***",
    "Invalid API key 3f9a0c7be1d2": "Invalid API key ***",
    "echo passwd swordfish": "echo passwd ***",
    "curl -u jane:swordfish http://x": "curl -u *** http://x",
    "curl -sSu jane:swordfish http://x": "curl -sSu *** http://x",
    "curl --user jane:swordfish http://x": "curl --user *** http://x",
    "curl -b 'sid=abc' http://x": "curl -b *** http://x",
    "api keys ['swordfish', '2nd-swordfish']": "api keys ['***', '***']",
    "auth_token => swordfish1, password := swordfish": "auth_token => ***, password := ***",
    "the password is swordfish1": "the password is ***",
    "sshpass -p swordfish ssh host": "sshpass -p *** ssh host",
    "docker login -u jane -p swordfish host": "docker login -u jane -p *** host",
    'Authorization: Digest username="jane", response="00ff"': "Authorization: Digest ***",
    "Cookie: session=abc; theme=dark": "Cookie: ***",
    "{'set-cookie': 'a=b; c=d', 'x': 1}": "{'set-cookie': '***', 'x': 1}",
    "?token=swordfish": "?token=***",
    "http://jane:swordfish@host/x": "http://host/x",
    "proxy jane:swordfish@proxy.example:3128": "proxy jane:***@proxy.example:3128",
    "{'SECRET_KEY_BASE': 'swordfish', 'DB_PASS': 'swordfish', 'GITHUB_PAT': 'swordfish1'}": (
        "{'SECRET_KEY_BASE': '***', 'DB_PASS': '***', 'GITHUB_PAT': '***'}"
    ),
    "mysqldump -u jane -pswordfish db": "mysqldump -u jane -p*** db",
    "redis-cli -h host -a swordfish": "redis-cli -h host -a ***",
    "openssl enc -aes256 -pass pass:swordfish": "openssl enc -aes256 -pass pass:***",
    "https://hooks.slack.com/services/T0/B0/swordfish": "https://hooks.slack.com/services/***",
    "https://api.telegram.org/bot123:swordfish/send": "https://api.telegram.org/bot***",
    "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END": "-----BEGIN RSA PRIVATE KEY-----***-----END",
}
NO_SECRETS = (
    'assert num_external_computed_tokens == 0, "KV connector"',
    "if name == 0 and token == 1:",
    "hf_quant_config.json and hf_transfer, hf_overrides={}",
    "max_num_batched_tokens=8192, num_tokens: 16, max_tokens=32",
    "pad_token='<|endoftext|>', eos_token_id=151645, next_token=12345, token: 5",
    "hf_token=None, api_key=None, use_auth_token=False, token=''",
    "unexpected token: identifier",
    "token => none; the token is 128001; secret is missing; tokens [1, 2]; login failed -p 8000",
    "the password is wrong; password authentication failed; /etc/passwd: no such file",
    "use --api-key to protect it, or --api-key KEY, or --api-key $VLLM_API_KEY, or --api-key @FILE; more",
    '-H "Authorization: Bearer $VLLM_API_KEY"',
    "Bearer token is missing; basic configuration; Basic Linear Algebra",
    "docker run -u 1000:1000 vllm/vllm-openai:v0.33@sha256:00ff",
    "--max-num-batched-tokens 8192 sk_size_per_head_128x64 sk-learn",
    "nvidia-cublas==13.1.0.3 std::chrono 10:02:11",
    "first_pass=3 num_pass: 4 pass: all, PASS 12; bypass:yes; mysql -port 3306; STATE_PATH=/x/bottle",
    "PWD=/work/x key=abc cache_key=0x99",
)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No values are registered, and those of the test are forgotten."""
    monkeypatch.setattr(secrets, "_known", secrets._Known())


@pytest.mark.parametrize("text", FORMS)
def test_forms_of_secrets_are_masked(text: str) -> None:
    assert masked(text) == masked(FORMS[text]) == FORMS[text]


@pytest.mark.parametrize("text", NO_SECRETS)
def test_nothing_else_is_masked(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("jane@janes-box:~/work$ vllm serve", "USER@HOST:~/work$ vllm serve"),
        ('  File "/home/jane/venv/lib/x.py", line 3', '  File "~/venv/lib/x.py", line 3'),
        ("/export/home/jane/m C:\\Users\\Jane\\m", "~/m ~\\m"),
        ("/scratch/jane/m /data/users/kim/m /homes/jane/m", "/scratch/USER/m /data/users/USER/m ~/m"),
        ("cache: /root/.cache/vllm", "cache: ~/.cache/vllm"),
        ("[2001:db8::17]:8000, fe80::1%eth0", "[ADDRESS]:8000, ADDRESS"),
        ("NCCL INFO eno1:10.1.2.3<0>", "NCCL INFO eno1:ADDRESS<0>"),
        ("eno1 at 52:54:00:12:34:56", "eno1 at MAC"),
        ("::1 and 127.0.0.1 at 10:02:11, std::bad_alloc", "::1 and 127.0.0.1 at 10:02:11, std::bad_alloc"),
        ("nvidia-cublas==13.1.0.3 Xid (PCI:0000:01:00): 31", "nvidia-cublas==13.1.0.3 Xid (PCI:0000:01:00): 31"),
    ],
)
def test_texts_for_strangers_have_no_names_of_users_and_addresses(text: str, shown: str) -> None:
    assert anonymous(text) == shown


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("text", ["wrong password {}", "{}", "a{}b", '{{"x": "{}"}}', "http://host/{}/y"])
def test_registered_values_are_masked_wherever_they_are(text: str) -> None:
    secrets.register_environment({"HF_TOKEN": "plainwords", "HTTPS_PROXY": "http://me:open%20sesame@proxy", "HOME": "/root"})
    for value in ("plainwords", "open sesame", "open%20sesame"):
        assert value not in masked(text.format(value))
    assert masked("/root") == "/root"


@pytest.mark.usefixtures("known")
def test_parameters_and_headers_of_requests_are_registered() -> None:
    secrets.register_url("http://127.0.0.1:8000?token=plainwords&page=chapter")
    secrets.register_header("X-Api-Key", "headerwords")
    secrets.register_header("Accept", "everything")
    assert masked("unknown plainwords, headerwords") == "unknown ***, ***"
    assert masked("chapter of everything") == "chapter of everything"


@pytest.mark.usefixtures("known")
def test_short_and_ordinary_values_do_not_change_words() -> None:
    secrets.register("key", "EMPTY", "test1")
    assert masked("key of EMPTY test1, latest10") == "key of EMPTY ***, latest10"


@pytest.mark.usefixtures("known")
def test_secrets_are_masked_where_text_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = 'pla"in\\words'
    secrets.register(value)
    console.info(f"a {value}")
    console.error(f"b {value}", f"c {value}")
    console.data(f"d {value}")
    console.table(("column",), [(value,)])
    console.json_data({"e": [value]})
    write_record(tmp_path / "record.json", {"f": value})
    out, err = capsys.readouterr()
    written = (tmp_path / "record.json").read_text()
    assert "words" not in out + err + written
    assert json.loads(written) == {"f": "***"}


UNITS = (
    "token=",
    "api_key=['",
    "--api-key a ",
    "curl -u ",
    "a:b@",
    "bearer ",
    "/home/x",
    "ab:cd:",
    "'cookie': ",
    "a,",
    '\\"',
    "_",
    "-",
)


@pytest.mark.parametrize("unit", UNITS)
def test_masking_takes_linear_time(unit: str) -> None:
    """Four times the text takes less than sixteen times the time, which a quadratic expression takes."""
    seconds = []
    for size in (40_000, 160_000):
        text = unit * (size // len(unit))
        start = time.process_time()
        anonymous(text)
        seconds.append(max(time.process_time() - start, 0.02))
    assert seconds[1] < 10 * seconds[0]


def test_the_name_of_a_session_is_no_secret() -> None:
    secrets.register_environment({"NOX_CURRENT_SESSION": "lintandtests", "DESKTOP_SESSION": "plasmashell"})
    assert secrets.masked("lintandtests in plasmashell") == "lintandtests in plasmashell"
