"""What each acceptance rule keeps and changes: tokens a round, overrides, and agreement with plain greedy decoding.

    python bench/bench_rules.py --questions spec_bench.jsonl --out cpu

One drafter and one budget for all rules, at temperature 0. Agreement says how far an answer is the plain one, token for
token; it says nothing of whether another answer is worse. Nothing is timed here: bench_generate.py does that.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import questions

from pad_engine import Engine, SamplingParams
from pad_engine.controller import Controller
from pad_engine.drafters.none import NoDrafter
from pad_engine.loader import make_engine
from pad_engine.models.loader import load_model
from pad_engine.output import Output
from pad_engine.rules.select import bind
from pad_engine.serving.generate import first_difference

RULES = (
    "greedy",
    "margin:form=paper",
    "margin:form=ratio",
    "margin:form=gap",
    "typical",
    "topk:k=2",
    "topk:k=3",
    "fly:form=paper",
    "fly:form=released",
)


@dataclass
class Answers:
    """What a rule gave in some questions. same_prefix: tokens ahead of the first that is not the plain answer's, of
    `tokens` of the longer of the two."""

    rounds: int = 0
    emitted: int = 0
    accepted: int = 0
    overrides: int = 0
    same_prefix: int = 0
    tokens: int = 0
    same: int = 0
    of: int = 0

    def add(self, out: Output, plain: Output) -> None:
        """One answer, and the plain one to the same question."""
        longest = max(len(out.token_ids), len(plain.token_ids))
        index = first_difference(out.token_ids, plain.token_ids)
        self.rounds += out.stats.rounds
        self.emitted += out.stats.completion_tokens
        self.accepted += out.stats.accepted_tokens
        self.overrides += out.stats.overrides
        self.same_prefix += longest if index is None else index
        self.tokens += longest
        self.same += index is None
        self.of += 1

    def figures(self) -> dict[str, float]:
        """As saved."""
        return {
            "answers": self.of,
            "emitted_tokens": self.emitted,
            "mean_accept_length": round(self.accepted / self.rounds, 3),
            "tokens_per_round": round(self.emitted / self.rounds, 3),
            "overrides_per_100_tokens": round(100 * self.overrides / self.emitted, 2),
            "same_prefix": round(self.same_prefix / self.tokens, 3),
            "same_answers": round(self.same / self.of, 3),
        }


def answer(engine: Engine, spec: str, ids: list[int], params: SamplingParams, prefix: Any) -> Output:
    """One answer by a rule; the engine keeps its models and caches."""
    engine.rule = bind(spec, engine.target, engine.num_tokens)
    return engine.generate(ids, params, prefix=prefix)


def answer_plainly(engine: Engine, ids: list[int], params: SamplingParams, prefix: Any) -> Output:
    """The same without a drafter."""
    drafting = engine.drafter, engine.controller
    engine.drafter, engine.controller = NoDrafter(), Controller(1, 0)
    try:
        return answer(engine, "greedy", ids, params, prefix)
    finally:
        engine.drafter, engine.controller = drafting


def shown(spec: str) -> str:
    """A rule without the folder of its classifier."""
    name, equals, path = spec.partition("model=")
    return name + equals + Path(path).name if equals else spec


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of all questions together."""
    names = {
        "mean_accept_length": "accepted/round",
        "tokens_per_round": "tokens/round",
        "overrides_per_100_tokens": "overrides/100 tokens",
        "same_prefix": "tokens before a difference",
        "same_answers": "answers identical",
    }
    lines = ["| rule | " + " | ".join(names.values()) + " |", "|---" * (1 + len(names)) + "|"]
    for row in rows:
        figures = row["all"]
        cells = [f"{figures[name]:.0%}" if name.startswith("same") else f"{figures[name]:.2f}" for name in names]
        lines.append(f"| {row['rule']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m", help="short name, folder or .gguf file")
    parser.add_argument("--name", help="of the model in the result file, where its path does not tell it")
    parser.add_argument("--draft-model", default="self:drop=7,13")
    parser.add_argument("--budget", type=int, default=12, help="rows of a pass; chains of one less are drafted")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--per-group", type=int, default=2)
    parser.add_argument("--pivot", help="checkpoint of a pivot classifier")
    parser.add_argument("--judge", help="checkpoint of a linear judge")
    parser.add_argument("--out", required=True, help="folder of results/ for this machine")
    args = parser.parse_args()

    specs = [*RULES]
    specs += [f"{rule}:model={path}" for rule, path in (("pivot", args.pivot), ("judge", args.judge)) if path]
    loaded = load_model(args.model, dtype=args.dtype, device=args.device, max_length=4096, accept_terms=True)
    drafter = f"draft-model:depth={args.budget - 1}"
    engine = make_engine(loaded, drafter=drafter, draft_model=args.draft_model, budget=args.budget, fixed_budget=True)
    params = SamplingParams(args.tokens)
    found: dict[str, dict[str, Answers]] = {spec: {"all": Answers()} for spec in specs}
    for group, chosen in questions.chosen(args.questions, args.per_group).items():
        for question in chosen:
            ids = questions.encoded(loaded, question)
            prefix = engine.prefill(ids)  # every rule reads the question's cache
            plain = answer_plainly(engine, ids, params, prefix)
            for spec in specs:
                out = answer(engine, spec, ids, params, prefix)
                for name in ("all", group):
                    found[spec].setdefault(name, Answers()).add(out, plain)
        print(group, {shown(spec): found[spec][group].figures()["mean_accept_length"] for spec in specs}, flush=True)
    rows = [
        {"rule": shown(spec), "all": groups.pop("all").figures(), "groups": {g: a.figures() for g, a in groups.items()}}
        for spec, groups in found.items()
    ]
    result = {
        "model": args.name or Path(args.model).stem,
        "dtype": args.dtype,
        "draft_model": args.draft_model if args.draft_model.startswith("self:") else Path(args.draft_model).stem,
        "drafter": drafter,
        "tokens": args.tokens,
        "per_group": args.per_group,
        "rules": rows,
    }
    print(table(rows))
    print(harness.save("rules", result, args.out))


if __name__ == "__main__":
    main()
