"""llama.cpp decodes, libpad decides: a chain of copied tokens is read in one llama_decode and judged on its own logits.

    make llama-cpp MODEL=model.gguf            # installs llama-cpp-python, and runs this with --check
    python examples/llama_cpp_margin.py model.gguf --rule margin:theta=0.9

Prints the text, the tokens a round and how many of them were overrides: tokens that the model ranks second, where it
hesitates between two. With --check also that the rule greedy writes what one token at a time writes. Next to read:
pad_engine/integrations/chain.py.
"""

import argparse
import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from torch import Tensor

from pad_engine.integrations.chain import MAX_DRAFT, Judge, PromptLookup, Stats, native_rule
from pad_engine.native import gumbel_pick

# an answer that repeats much of its prompt, where copying is a good guess
PROMPT = (
    "Correct the spelling: The owl left teh barn at dusk, crosed the river, and came bak before the farmer woke. The "
    "farmer nevr saw the owl, but he knew that the owl had been there."
)


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp tells a lot about a model on standard error."""


class LlamaCpp:
    """A model and the cache of one sequence. length: entries of the cache."""

    def __init__(self, path: Path, threads: int, context: int = 2048) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = context, threads, threads
        params.swa_full = True  # a sliding window keeps what rejected rows would push out of it
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.num_tokens = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.chunk = llama_cpp.llama_n_batch(self.context)
        self.batch = llama_cpp.llama_batch_init(self.chunk, 0, 1)
        self.capacity, self.length = llama_cpp.llama_n_ctx(self.context), 0

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def read(self, ids: Sequence[int], logits: bool = True) -> Tensor:
        """One llama_decode. Returns fp32 logits `[len(ids), V]` in llama.cpp's own memory, valid until the next."""
        self.batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            self.batch.token[row], self.batch.pos[row] = token, self.length + row
            self.batch.n_seq_id[row], self.batch.seq_id[row][0], self.batch.logits[row] = 1, 0, logits
        if status := llama_cpp.llama_decode(self.context, self.batch):
            sys.exit(f"llama_decode failed with status {status}")
        self.length += len(ids)
        if not logits:
            return torch.empty(0, self.num_tokens)
        pointer = llama_cpp.llama_get_logits(self.context)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(len(ids), self.num_tokens)))

    def crop(self, length: int) -> None:
        """Keep the first `length` entries of the cache."""
        memory = llama_cpp.llama_get_memory(self.context)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, length, -1):
            sys.exit("this model's memory cannot take rejected rows back (is it recurrent?)")
        self.length = length

    def prompt(self, text: str) -> list[int]:
        """Ids of a user's message, by the model's chat template if it has one."""
        data = text.encode()
        if template := llama_cpp.llama_model_chat_template(self.model, None):
            message = (llama_cpp.llama_chat_message * 1)((b"user", data))
            room = ctypes.create_string_buffer(4096 + 2 * len(data))
            size = llama_cpp.llama_chat_apply_template(template, message, 1, True, room, len(room))
            if 0 < size <= len(room):
                data = room.raw[:size]
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        room, pieces = ctypes.create_string_buffer(256), []
        for token in ids:
            size = llama_cpp.llama_token_to_piece(self.vocab, token, room, len(room), 0, False)
            pieces.append(room.raw[: max(0, size)])
        return b"".join(pieces).decode(errors="replace")

    def ends(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))


def decode(
    llama: LlamaCpp, prompt: Sequence[int], rule: str, num_draft: int, max_tokens: int
) -> tuple[list[int], Stats]:
    """The answer's ids, with the end token if it comes to one. num_draft 0: one token at a time."""
    llama.crop(0)
    for start in range(0, len(prompt) - 1, llama.chunk):
        llama.read(prompt[start : min(start + llama.chunk, len(prompt) - 1)], logits=False)
    judge, lookup = Judge(native_rule(rule, llama.num_tokens)), PromptLookup()
    ids, end = list(prompt), min(len(prompt) + max_tokens, llama.capacity)
    while len(ids) < end and (len(ids) == len(prompt) or not llama.ends(ids[-1])):
        draft = lookup(ids, min(num_draft, end - len(ids) - 1)) if num_draft else []
        logits = llama.read([ids[-1], *draft])
        # temperature 0: the largest logit of each row
        picks = gumbel_pick(logits, torch.arange(len(logits)), seed=0, temperature=0.0)
        decided = judge.decide(logits, picks, draft)
        stop = next((place for place, token in enumerate(decided.tokens, 1) if llama.ends(token)), len(decided.tokens))
        judge.emit(decided, stop)
        ids += decided.tokens[:stop]
        llama.crop(len(ids) - 1)  # the last token is not read yet
    return ids[len(prompt) :], judge.stats


def first_difference(llama: LlamaCpp, prompt: Sequence[int], mine: Sequence[int], plain: Sequence[int]) -> str:
    """Where two answers part, and how near the two tokens are to each other there."""
    if list(mine) == list(plain):
        return ""
    pairs = enumerate(zip(mine, plain, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), None)
    if place is None:
        return f"one has {len(mine)} tokens, the other {len(plain)}"
    llama.crop(0)
    row = llama.read([*prompt, *plain[:place]])[-1]
    return f"they part at token {place}, where the two logits are {row[mine[place]]:.4f} and {row[plain[place]]:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--rule", default="margin:theta=0.9")
    parser.add_argument("--num-draft", type=int, default=8, choices=range(1, MAX_DRAFT + 1), metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--check", action="store_true", help="compare the rule greedy with one token at a time")
    args = parser.parse_args()
    llama = LlamaCpp(args.model, args.threads)
    prompt = llama.prompt(args.prompt)
    ids, stats = decode(llama, prompt, args.rule, args.num_draft, args.max_tokens)
    print(llama.text(ids))
    print(f"\n{args.rule}: {len(ids)} tokens in {stats.rounds} rounds, {stats.tokens_per_round:.2f} a round; ", end="")
    print(f"{stats.accepted_tokens} of {stats.draft_tokens} drafted tokens accepted, {stats.overrides} by override")
    fault = ""
    if args.check:
        plain, _ = decode(llama, prompt, "greedy", 0, args.max_tokens)
        greedy, stats = decode(llama, prompt, "greedy", args.num_draft, args.max_tokens)
        fault = first_difference(llama, prompt, greedy, plain)
        verdict = f"DIFFERENT: {fault}" if fault else "the same as one token at a time"
        print(f"greedy: {len(greedy)} tokens in {stats.rounds} rounds, {verdict}")
    llama.close()
    sys.exit(1 if fault else 0)


if __name__ == "__main__":
    main()
