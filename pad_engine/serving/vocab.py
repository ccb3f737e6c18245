"""`pad vocab`: the most frequent tokens of some texts, as the list that `--drafter draft-model:vocab=FILE` takes.

Next to read: drafters/draft_vocab.py.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pad_engine.serving import options
from pad_engine.serving.terminal import BAD_USAGE, fetch, reported


def vocab(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files like what the model is to write.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The list, in JSON.")],
    model: options.Model = "smollm2-135m",
    size: Annotated[int, typer.Option(help="Tokens of the list.")] = 32768,
    accept_terms: options.AcceptTerms = False,
) -> None:
    """List the most frequent tokens of texts, for a draft model that proposes no others."""
    with reported(bad_request=BAD_USAGE):
        from pad_engine.drafters.draft_vocab import most_frequent
        from pad_engine.files import check_place, write_file
        from pad_engine.models.loader import load_tokenizer

        check_place(out)
        ids, share = most_frequent(load_tokenizer(fetch(model, accept_terms)), texts, size)
        write_file(out, f"{json.dumps(ids)}\n".encode())
        print(f"{len(ids)} tokens, which are {share:.2%} of the texts: {out}", file=sys.stderr)
