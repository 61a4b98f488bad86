"""Datasets and arrivals, without a server."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from sm120kit.bench import dataset, workload
from sm120kit.bench.workload import Case
from sm120kit.core.errors import BadInput

CELL = Case(2, 100, 0)


def lines(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_datasets_of_three_forms(tmp_path: Path) -> None:
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "One?"},
        {"from": "gpt", "value": "Yes."},
        {"from": "human", "value": "Two?"},
    ]
    messages = [{"role": "user", "content": "Three?"}]
    read = dataset.read(lines(tmp_path / "d.jsonl", {"prompt": "Zero?"}, {"conversations": sharegpt}, {"messages": messages}))
    assert [[(m.role, m.content) for m in conversation][-1] for conversation in read] == [
        ("user", "Zero?"),
        ("user", "Two?"),
        ("user", "Three?"),
    ]
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([{"id": "x", "conversations": sharegpt}]))
    (conversation,) = dataset.read(listed)
    assert [[message.content for message in turn] for turn in dataset.turns(conversation)] == [
        ["Be brief.", "One?"],
        ["Be brief.", "One?", "Yes.", "Two?"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no conversation"),
        ('{"prompt": 3}', "entry 1 is no conversation"),
        ('{"prompt": "a"}\n{"text": "b"}', "entry 2 is no conversation"),
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ('{"conversations": [{"from": "tool", "value": "x"}]}', "entry 1 is no conversation .*tool"),
    ],
)
def test_bad_datasets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        dataset.read(path)
    with pytest.raises(BadInput, match=r"absent\.jsonl: No such file"):
        dataset.read(tmp_path / "absent.jsonl")


def test_conversations_are_divided_among_users(tmp_path: Path) -> None:
    entries = [
        {
            "messages": [
                {"role": "user", "content": f"{n}a"},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": f"{n}b"},
            ]
        }
        for n in range(3)
    ]
    named = workload.load("quick")
    changed = workload.changed(
        named, conversations=dataset.read(lines(tmp_path / "d.jsonl", *entries)), extra_body={"top_k": 5}
    )
    assert changed.sha256 != named.sha256
    concurrency = [list(user) for user in workload.all_requests(changed.workload, CELL, "m", "salt")]
    texts = [[request.body["messages"][-1]["content"] for request in user] for user in concurrency]
    assert texts == [["0a", "0b", "2a", "2b"], ["1a", "1b"]]
    assert len(concurrency[0][1].body["messages"]) == 3, "the second request has the conversation until then"
    assert all(request.body["top_k"] == 5 for user in concurrency for request in user)
    assert workload.prompts(changed.workload) != workload.prompts(named.workload)


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_requests_arrive_at_a_rate(arrivals: str) -> None:
    named = workload.changed(workload.load("quick"), rate=4.0, arrivals=arrivals, requests_per_stream=1000, seconds=0.0)
    concurrency = [list(user) for user in workload.all_requests(named.workload, CELL, "m", "salt")]
    assert len(concurrency) == 2000 and all(len(user) == 1 for user in concurrency), "nobody waits for another request"
    times = [user[0].at for user in concurrency]
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0 and times[-1] / len(gaps) == pytest.approx(0.25, rel=0.1)
    deviation = (sum((gap - 0.25) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(0.25 if arrivals == "poisson" else 0, rel=0.15, abs=1e-9)


def test_shared_prefix_is_the_same_in_all_requests() -> None:
    named = workload.changed(workload.load("quick"), shared_prefix_tokens=1000, context_tokens=(100,))
    concurrency = workload.all_requests(named.workload, Case(2, 10, 100), "m", "salt")
    texts = [request.body["messages"][0]["content"].split() for user in concurrency for request in user]
    assert texts[0][:500] == texts[1][:500] and texts[0][500:540] != texts[1][500:540]
