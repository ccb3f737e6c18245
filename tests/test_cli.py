"""The command `pad`: what it prints where, its exit codes, Ctrl-C and closed pipes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import Make, tiny_engine
from typer.testing import CliRunner, Result

from pad_engine import SamplingParams
from pad_engine.output import Stats
from pad_engine.serving.cli import app

PROMPT = "one two three one two three one two"
FIGURES = re.compile(
    r"(\d+) tokens in [\d.]+ s: [\d.]+ tokens/s, (\d+) rounds, mean accept length [\d.]+, [\d.]+ tokens per round(.*)"
)
MAIN = [sys.executable, "-c", "from pad_engine.serving.cli import main; main()"]


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    return make_model("llama")


def pad(*arguments: str | Path, stdin: str | bytes | None = None, **env: str) -> Result:
    return CliRunner(env=env).invoke(app, [str(argument) for argument in arguments], input=stdin)


def generate(folder: Path, *arguments: str, prompt: str = PROMPT, stdin: str | bytes | None = None) -> Result:
    # -- as a prompt may begin with a dash
    options = ("--model", folder, "--device", "cpu", "--max-tokens", "24", "--ignore-eos", *arguments)
    return pad("generate", *options, "--", prompt, stdin=stdin)


def check_error(result: Result, code: int, *words: str) -> None:
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert result.exit_code == code, result.output
    assert len(errors) == 1 and all(word in result.stderr for word in words), result.stderr
    assert all(line.startswith(("error: ", "hint: ", "memory: ")) for line in lines), result.stderr
    assert not result.stdout


def test_text_goes_to_stdout_and_figures_to_stderr(folder: Path) -> None:
    result = generate(folder)
    expected = tiny_engine(folder).generate(PROMPT, SamplingParams(24, ignore_eos=True))
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.text if expected.text.endswith("\n") else expected.text + "\n"
    match = FIGURES.fullmatch(result.stderr.splitlines()[-1])
    assert match and match[1] == "24" and not match[3]


def test_json_is_one_object_with_all_fields(folder: Path) -> None:
    result = generate(folder, "--json", "--temperature", "0.8", "--seed", "7", "--compare-plain")
    expected = tiny_engine(folder).generate(PROMPT, SamplingParams(24, 0.8, 7, ignore_eos=True))
    assert result.exit_code == 0, result.output
    out = json.loads(result.stdout)
    assert out["token_ids"] == expected.token_ids and out["text"] == expected.text
    assert out["finish_reason"] == "length" and out["logprobs"] is None
    assert (out["model"], out["drafter"], out["rule"]) == (str(folder), "ngram", "match")
    assert (out["device"], out["dtype"]) == ("cpu", "float32")
    assert out["plain_tokens_per_second"] > 0 and out["plain_same_tokens"] is True
    stats = out["stats"]
    assert stats["seed"] == 7 and stats["completion_tokens"] == 24 and stats["rounds"] <= 24
    assert {"draft_tokens", "accepted_tokens", "overrides", "acceptance_by_position"} <= stats.keys()
    assert {"mean_accept_length", "tokens_per_round", "time_to_first_token", "tokens_per_second"} <= stats.keys()
    assert not result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--drafter", "ngram:min=1,depth=4", "--trees", "best-first"),
        ("--draft-model", "self:drop=1", "--temperature", "1"),
    ],
)
def test_compare_plain_says_same_tokens(folder: Path, arguments: tuple[str, ...]) -> None:
    result = generate(folder, "--compare-plain", *arguments)
    assert result.exit_code == 0, result.output
    line = result.stderr.splitlines()[-1]
    assert re.search(r"; plain [\d.]+ tokens/s \([\d.]+x\), same tokens$", line)
    # the seed that was drawn is told, so that the answer can be had again
    assert (", seed " in line) == ("--temperature" in arguments)


def test_stdin_is_the_prompt(folder: Path) -> None:
    texts = [generate(folder).stdout, generate(folder, prompt="-", stdin=f"{PROMPT}\n").stdout]
    assert texts[0] == texts[1]
    check_error(generate(folder, prompt="-", stdin=b"\xff\xfe"), 2, "not UTF-8")


def test_chat_uses_the_template(folder: Path) -> None:
    result = generate(folder, "--chat", "--system", "be brief", "--json")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    expected = tiny_engine(folder).generate(messages, SamplingParams(24, ignore_eos=True))
    assert json.loads(result.stdout)["token_ids"] == expected.token_ids


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "nan"), "temperature"),
        (("--seed", "-1"), "seed"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--trees", "oak"), "trees must be one of chain, best-first"),
        (("--rule", "lucky"), "rule must be one of auto, greedy, match, rejection"),
        (("--rule", "greedy", "--temperature", "1"), "rule greedy needs temperature 0"),
        (("--drafter", "oracle"), "drafter must be"),
        (("--drafter", "ngram:min=many"), "min must be a whole number"),
        (("--drafter", "ngram:speed=9"), "unknown option 'speed'"),
        (("--drafter", "draft-model"), "needs a draft_model"),
        (("--drafter", "ngram", "--draft-model", "self:drop=3"), "drafter ngram uses none"),
        (("--draft-model", "self:drop=a"), "layers must be whole numbers"),
        (("--draft-model", "self:drop="), "layers must be whole numbers"),
        (("--draft-model", "self:layers=0,1,0"), "names a layer twice"),
        (("--rule", "margin:max-overrides=0"), "max-overrides must be in"),
        (("--device", "tpu"), "device"),
        (("--dtype", "int3"), "dtype"),
        (("--system", "be brief"), "needs --chat"),
        (("--logprobs", "3"), "--logprobs needs --json"),
        (("--logprobs", "99", "--json"), "logprobs must be"),
        (("--top-k", "-1"), "top_k"),
        (("--top-p", "0"), "top_p must be above 0"),
        (("--min-p", "1.5"), "min_p"),
        (("--min-tokens", "25"), "min_tokens"),
        (("--repetition-penalty", "0"), "repetition_penalty"),
        (("--presence-penalty", "3"), "presence_penalty"),
        (("--frequency-penalty", "nan"), "frequency_penalty"),
        (("--logit-bias", "97"), "--logit-bias must be ID=BIAS, as in 42=-5, got '97'"),
        (("--logit-bias", "a=b"), "ID=BIAS"),
        (("--logit-bias", "97=nan"), "logit_bias"),
        (("--logit-bias", "-1=1"), "logit_bias"),
        (("--stop", ""), "stop must be a text or texts"),
        (("--stop-token-id", "-1"), "stop_token_ids"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_looked_for(arguments: tuple[str, ...], words: str) -> None:
    check_error(generate(Path("/no/such/model"), *arguments), 2, words)


SAMPLED = {"temperature": 1.5, "seed": 5}


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("--top-k", "4"), SAMPLED | {"top_k": 4}),
        (("--top-p", "0.4"), SAMPLED | {"top_p": 0.4}),
        (("--min-p", "0.3"), SAMPLED | {"min_p": 0.3}),
        (("--repetition-penalty", "5"), {"repetition_penalty": 5.0}),
        (("--presence-penalty", "2"), {"presence_penalty": 2.0}),
        (("--frequency-penalty", "2"), {"frequency_penalty": 2.0}),
        (("--logit-bias", "97=50", "--logit-bias", "98=50.5"), {"logit_bias": {97: 50, 98: 50.5}}),
        (("--logit-bias", "98=100", "--stop", "x", "--stop", "bbb"), {"logit_bias": {98: 100}, "stop": ("x", "bbb")}),
        (("--logit-bias", "10=100", "--stop", r"\n\n"), {"logit_bias": {10: 100}, "stop": "\n\n"}),
        (("--logit-bias", "9=100", "--stop", r"\t"), {"logit_bias": {9: 100}, "stop": "\t"}),
        (("--logit-bias", "92=100", "--stop", r"\\"), {"logit_bias": {92: 100}, "stop": "\\"}),
        (
            ("--logit-bias", "98=100", "--stop-token-id", "97", "--stop-token-id", "98", "--min-tokens", "3"),
            {"logit_bias": {98: 100}, "stop_token_ids": (97, 98), "min_tokens": 3},
        ),
        (("--rule", "rejection"), SAMPLED),
    ],
)
def test_options_of_a_request(folder: Path, arguments: tuple[str, ...], fields: dict[str, object]) -> None:
    sampled = ("--temperature", "1.5", "--seed", "5") if "seed" in fields else ()
    out = json.loads(generate(folder, "--json", "--drafter", "none", *sampled, *arguments).stdout)
    params = SamplingParams(24, ignore_eos=True, **fields)  # type: ignore[arg-type]
    engine = tiny_engine(folder, rule="rejection" if "rejection" in arguments else "auto")
    expected = engine.generate(PROMPT, params)
    assert (out["token_ids"], out["text"]) == (expected.token_ids, expected.text)
    assert out["finish_reason"] == expected.finish_reason == ("stop" if "--stop" in str(arguments) else "length")
    plain = engine.generate(PROMPT, SamplingParams(24, ignore_eos=True, temperature=1.5 if sampled else 0, seed=5))
    assert "rejection" in arguments or out["token_ids"] != plain.token_ids, "the option does something here"


def test_json_has_logprobs(folder: Path) -> None:
    out = json.loads(generate(folder, "--json", "--logprobs", "2").stdout)
    assert [entry["token_id"] for entry in out["logprobs"]] == out["token_ids"]
    for entry in out["logprobs"]:
        (best, first), (_, second) = entry["top"]
        assert best == entry["token_id"] and first == pytest.approx(entry["logprob"]) and second <= first < 0
    assert [entry["top"] for entry in json.loads(generate(folder, "--json", "--logprobs", "0").stdout)["logprobs"]]


def test_a_comparison_warms_up_with_fewer_tokens_than_the_minimum(folder: Path) -> None:
    result = generate(folder, "--compare-plain", "--min-tokens", "20")
    assert result.exit_code == 0 and result.stderr.endswith("same tokens\n"), result.output


def test_options_that_do_not_suit_the_model_are_bad_usage(folder: Path) -> None:
    check_error(generate(folder, "--max-length", "9999"), 2, "max_length must be in [2, 256]")
    check_error(generate(folder, "--draft-model", "self:drop=7"), 2, "layers must be in [0, 2]")
    check_error(generate(folder, "--draft-model", "self:drop=1", "--drafter", "draft-model:x=1"), 2, "unknown option")


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "x", "--budget", "65"], ["nonsense"], ["info", "x"]])
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    result = pad(*arguments)
    assert result.exit_code == 2 and "Error" in result.stderr and not result.stdout


def test_failures_exit_with_1(folder: Path, tmp_path: Path) -> None:
    check_error(generate(Path("smollm2")), 1, "no model 'smollm2'", "hint: did you mean smollm2-135m?")
    check_error(generate(tmp_path), 1, "has no config.json")
    check_error(generate(folder, "--adapter", str(tmp_path)), 1, str(tmp_path))
    check_error(generate(folder, prompt="x" * 256), 1, "256 tokens", "hint: ")
    check_error(generate(folder, prompt=""), 1, "the prompt is empty")
    check_error(generate(folder, "--logit-bias", "300=1"), 1, "token id 300 is outside the vocabulary of 300")


def test_terms_must_be_accepted(tmp_path: Path) -> None:
    # nobody can be asked here, and nothing is fetched
    result = pad("generate", "x", "--model", "gemma3-270m", PAD_CACHE=str(tmp_path), PAD_ACCEPT_TERMS="")
    check_error(result, 1, "Gemma Terms of Use", "https://ai.google.dev/gemma/terms", "hint: ", "--accept-terms")


def test_models_lists_short_names(tmp_path: Path) -> None:
    table = pad("models", PAD_CACHE=str(tmp_path))
    assert table.exit_code == 0, table.output
    line = next(line for line in table.stdout.splitlines() if "smollm2-135m" in line)
    assert "Apache-2.0" in line and " no " in line and str(tmp_path) in line
    entries = json.loads(pad("models", "--json", PAD_CACHE=str(tmp_path)).stdout)
    assert {entry["name"] for entry in entries} == {"smollm2-135m", "gemma3-270m"}
    assert all({"name", "description", "licence", "size", "cached", "path"} == entry.keys() for entry in entries)


def test_info_describes_machine_and_model(folder: Path, tmp_path: Path) -> None:
    facts = json.loads(pad("info", "--model", folder, "--json", PAD_CACHE=str(tmp_path)).stdout)
    assert facts["cache"] == str(tmp_path) and facts["cpus"] >= 1 and facts["python"] and facts["torch"]
    assert (facts["libpad"] is None) == (facts["libpad_missing"] is not None)
    model = facts["model"]
    assert model["family"] == "llama" and model["layers"] == 3 and model["vocab_size"] == 300
    assert model["context"] == 256 and model["dtypes_on_disk"] == ["F32"] and model["eos_token_ids"] == [256]
    assert model["memory"]["total"] > model["memory"]["weights"] >= 4 * model["parameters"] == model["bytes_on_disk"]
    text = pad("info", "--model", folder).stdout
    assert "vocab size         300" in text and "chat template      yes" in text
    check_error(pad("info", "--model", tmp_path), 1, "has no config.json")


def test_ctrl_c_ends_the_request_after_its_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Stats.add

    def add_and_interrupt(stats: Stats, commit: object) -> None:
        add(stats, commit)  # type: ignore[arg-type]
        if stats.rounds == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Stats, "add", add_and_interrupt)
    result = generate(folder, "--json", "--drafter", "none")
    assert result.exit_code == 130, result.output
    out = json.loads(result.stdout)
    assert out["finish_reason"] == "cancelled" and out["stats"]["rounds"] == len(out["token_ids"]) == 3


def test_ctrl_c_while_the_prompt_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pad_engine.engine.prefill", lambda *_: signal.raise_signal(signal.SIGINT))
    result = generate(folder)
    assert result.exit_code == 130 and not result.stdout
    assert result.stderr.splitlines()[-1].startswith("0 tokens") and result.stderr.endswith(", cancelled\n")


def long_run(make_model: Make) -> tuple[Path, "subprocess.Popen[bytes]"]:
    folder = make_model("llama", max_position_embeddings=32768)
    options = ["--model", str(folder), "--device", "cpu", "--drafter", "none", "--temperature", "1", "--seed", "3"]
    options += ["--max-tokens", "30000", "--max-length", "32768", "--ignore-eos"]
    command = [*MAIN, "generate", PROMPT, *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    # unbuffered: communicate would not see what a buffer has read ahead
    return folder, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=env)


def test_ctrl_c_keeps_the_text(make_model: Make) -> None:
    folder, process = long_run(make_model)
    assert process.stdout
    start = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    match = FIGURES.fullmatch(stderr.decode().splitlines()[-1])
    assert match and match[3] == ", cancelled", stderr
    params = SamplingParams(int(match[1]), 1.0, 3, ignore_eos=True)
    expected = tiny_engine(folder, max_length=32768).generate(PROMPT, params).text
    assert (start + rest).decode().removesuffix("\n") == expected.removesuffix("\n")


def test_a_closed_pipe_ends_quietly(make_model: Make) -> None:
    _, process = long_run(make_model)
    assert process.stdout and process.stderr
    process.stdout.read(20)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert [line for line in process.stderr.read().decode().splitlines() if not line.startswith("memory: ")] == []
    process.stderr.close()


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, pad_engine.serving.cli; sys.exit(bool({'torch', 'transformers', 'rich'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
