"""C11: a seed repeats an answer in another process too, whatever ran there before, and with other drafters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import Make, tiny_engine

from pad_engine import SamplingParams

PROMPT = "one two three, one two three, one two"
RUN = "from pad_engine.serving.cli import main; main()"


def answer(folder: Path, *options: str) -> list[int]:
    fixed = ("--model", str(folder), "--device", "cpu", "--max-tokens", "32", "--ignore-eos", "--temperature", "0.8")
    command = [sys.executable, "-c", RUN, "generate", *fixed, "--seed", "11", "--json", *options, "--", PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    token_ids: list[int] = json.loads(done.stdout)["token_ids"]
    return token_ids


@pytest.mark.parametrize("rule", ["match", pytest.param("rejection", marks=pytest.mark.slow)])
def test_a_seed_repeats_in_another_process(make_model: Make, rule: str) -> None:
    folder = make_model("llama")
    draft = ("--draft-model", "self:layers=0,1", "--drafter", "draft-model:depth=3", "--rule", rule)
    engine = tiny_engine(
        folder, "draft-model:depth=3", draft_model="self:layers=0,1", rule=rule, controller=True, budget=16
    )
    params = SamplingParams(32, 0.8, 11, ignore_eos=True)
    engine.generate("something else before", SamplingParams(9, 0.8, 5))
    here = engine.generate(PROMPT, params).token_ids
    assert answer(folder, *draft) == here
    if rule == "match":
        assert answer(folder, "--drafter", "none") == here
    engine.generate([1, 2, 3], SamplingParams(5))
    assert engine.generate(PROMPT, params).token_ids == here
