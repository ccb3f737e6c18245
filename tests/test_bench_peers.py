"""Peers decode the same prompts from the same weights, and one that fails is a line of the result."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benches import bench_module

bench, peers = bench_module("bench_peers"), bench_module("peers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def job() -> Any:
    return bench.shape_job("tiny+tiny", 8, device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CONTEXT", 6)


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer != "flashspec"])
def test_every_peer_gives_the_known_answer(job: Any, peer: str) -> None:
    found = peers.run(peer, job)
    assert found["answers"] == [[*range(1, 9)]] and len(found["seconds"]) == 1
    assert found["ms_per_token"] == pytest.approx(1000 * found["seconds"][0] / 8, rel=0.01)


def test_prompts_of_groups_are_also_counted_by_group(job: Any) -> None:
    both = dataclasses.replace(job, prompts=job.prompts * 3, groups=("qa", "rag", "qa"))
    found = peers.run("pad plain", both)
    one, other, third = found["seconds"]
    assert found["groups"] == {
        "qa": pytest.approx(16 / (one + third), rel=0.01), "rag": pytest.approx(8 / other, rel=0.01)
    }  # fmt: skip


def test_flashspec_where_it_is_installed(job: Any) -> None:
    pytest.importorskip("flashspec")
    assert peers.run("flashspec", job)["answers"] == [[*range(1, 9)]]


def test_the_draft_model_of_transformers_errs_where_ours_does(job: Any) -> None:
    draft = peers.successor_llama(job, job.draft, job.wrong)
    after = [peers.generates(draft)([5, token], 1)[0] == token + 1 for token in range(20)]
    assert [token for token, right in enumerate(after) if not right] == [token for token in job.wrong if token < 20]


def test_results_are_compared_and_failures_are_lines(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {
        "pad plain": {"tokens_per_second": 100.0, "answers": [[1, 2]], "seconds": [1.0]},
        "pad ngram": {"tokens_per_second": 150.0, "answers": [[1, 3]], "seconds": [1.0]},
    }

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        peer, path = command[-2:]
        assert peers.Job(**json.loads(Path(path).read_text())).prompts == job.prompts
        if peer == "flashspec":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        failed = peer not in printed
        out = "" if failed else f"loading\n{json.dumps(printed[peer])}\n"
        return subprocess.CompletedProcess(command, int(failed), out, "Traceback\nValueError: no such peer\n")

    monkeypatch.setattr(subprocess, "run", run)
    found: dict[str, Any] = {}
    for peer in ("pad plain", "pad ngram", "transformers eager", "flashspec"):
        found[peer] = bench.result(peer, job, 7, {"peers": found})
    answers = [found[peer].pop("answers") for peer in ("pad plain", "pad ngram")]
    assert len(answers[0]) == len(answers[1]) == 1 and answers[0] != answers[1]
    assert found["pad plain"]["over_pad_plain"] == 1 and found["pad plain"]["equal_answers"] == "1 of 1"
    assert found["pad ngram"] | {"seconds": None} == {
        "tokens_per_second": 150.0, "seconds": None, "over_pad_plain": 1.5, "equal_answers": "0 of 1"
    }  # fmt: skip
    assert "over_pad_plain" not in bench.result("pad ngram", job, 7, {"peers": {"pad plain": {"error": "failed"}}})
    assert found["transformers eager"] == {"error": "ValueError: no such peer"}
    assert found["flashspec"] == {"error": "took more than 7 s"}


@pytest.mark.slow
def test_a_peer_is_a_process(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # scripts of bench/ find one another by their folder
    assert bench.run_peer("no such peer", job, 60) == {"error": "KeyError: 'no such peer'"}
    assert bench.run_peer("pad plain", job, 60)["answers"] == [[*range(1, 9)]]
