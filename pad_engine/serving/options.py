"""The options that several commands share, and what they make: a request's parameters and an engine.

Next to read: generate.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.serving.terminal import fetch

if TYPE_CHECKING:
    from pad_engine.engine import Engine

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}

Model = Annotated[str, typer.Option(help="Short name (see `pad models`), folder, .gguf file or hub id.")]
DraftModel = Annotated[
    str | None, typer.Option(help='Model that drafts, or "self:drop=3,4": the target without these layers.')
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="none, ngram[:min=2,depth=15] or draft-model[:depth=8,vocab=N|FILE].", show_default="ngram, or draft-model"
    ),
]
Trees = Annotated[str, typer.Option(help="chain or best-first.")]
Rule = Annotated[
    str,
    typer.Option(
        help="auto, greedy, match, rejection; or relaxed: margin, pivot:model=FILE, judge, typical, topk, fly."
    ),
]
Budget = Annotated[int, typer.Option(min=1, max=64, help="Rows of one pass at most.")]
Adapter = Annotated[list[str] | None, typer.Option(help="LoRA folder to merge; may be given again.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Weights = Annotated[str, typer.Option(help="auto, as the type says; int8 or fp8, quantised at load.")]
DraftWeights = Annotated[str, typer.Option(help="The same for a draft model of its own.")]
MaxLength = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer together.", show_default="the model's, up to 8192")
]
AcceptTerms = Annotated[bool, typer.Option("--accept-terms", help="Accept the terms that a model is under.")]

MaxTokens = Annotated[int, typer.Option(help="New tokens at most.")]
MinTokens = Annotated[int, typer.Option(help="No end of the answer before so many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Repeats a sampled answer.", show_default="a fresh one")]
TopK = Annotated[int, typer.Option(help="Sample from so many likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this probability together; 1 is off.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this share of the likeliest one's; 0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divides the logits of tokens that came before; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Taken from the logits of tokens in the answer; 0 is off.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each time that they came; 0 is off.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be given again.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help=r"Text that ends the answer; \n, \t and \\ are understood; may be given again."),
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="Token that ends the answer; may be given again.")
]


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made of, as it was typed."""

    model: str
    draft_model: str | None
    drafter: str | None
    trees: str
    rule: str
    budget: int
    adapters: Sequence[str]
    device: str
    dtype: str
    max_length: int | None
    accept_terms: bool
    weights: str = "auto"
    draft_weights: str = "auto"

    @property
    def drafter_spec(self) -> str:
        """The drafter's name and options."""
        from pad_engine.loader import drafter_spec

        return drafter_spec(self.drafter, self.draft_model)

    def check(self, params: SamplingParams) -> None:
        """Refuse bad values before a model is fetched or loaded, which may take minutes."""
        from pad_engine.loader import check_draft_model, check_drafter, pick_draft_weights
        from pad_engine.models.loader import pick_device, pick_dtype
        from pad_engine.models.quantise import pick_weights
        from pad_engine.rules.select import make_rule, rule_for

        rule_for(make_rule(self.rule, num_tokens=2), params)
        device = pick_device(self.device)
        pick_dtype(self.dtype, device)
        pick_draft_weights(self.draft_weights, self.draft_model, pick_weights(self.weights, device), device)
        name, _ = check_drafter(self.drafter_spec, self.trees, budget=2)
        check_draft_model(name, self.draft_model)

    def load(self, verbose: bool = False) -> "Engine":
        """Fetch and load. verbose: the memory estimate goes to standard error."""
        from pad_engine.loader import load_engine

        return load_engine(
            fetch(self.model, self.accept_terms),
            drafter=self.drafter_spec,
            draft_model=self.draft_folder(),
            draft_weights=self.draft_weights,
            trees=self.trees,
            rule=self.rule,
            device=self.device,
            dtype=self.dtype,
            weights=self.weights,
            max_length=self.max_length,
            adapters=self.adapters,
            budget=self.budget,
            accept_terms=self.accept_terms,
            verbose=verbose,
        )

    def draft_folder(self) -> str | None:
        """The draft model's folder; `self:...` is no folder and stays what it is."""
        if self.draft_model is None or self.draft_model.startswith("self:"):
            return self.draft_model
        return str(fetch(self.draft_model, self.accept_terms))


def unescape(text: str) -> str:
    r"""\n, \t and \\ as the characters that they stand for."""
    return re.sub(r"\\[nt\\]", lambda match: ESCAPES[match[0]], text)


def parse_biases(pairs: Sequence[str]) -> dict[int, float]:
    """ID=BIAS, each as typed."""
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise RequestError(f"--logit-bias must be ID=BIAS, as in 42=-5, got {pair!r}") from None
    return biases
