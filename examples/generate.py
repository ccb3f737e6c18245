"""Load a model, stream an answer, and say how fast it was: `python examples/generate.py [model] [prompt]`.

The model is a short name (`pad models`), a folder, a .gguf file or a hub id. Next to read: pad_engine/engine.py.
"""

import sys

from pad_engine import Engine, SamplingParams

# an answer that repeats much of its prompt, where copying is a good guess
PROMPT = (
    "Copy this text word by word: The owl left the barn at dusk, crossed the river, and came back before the farmer "
    "woke. The farmer never saw the owl, but he knew that the owl had been there."
)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    prompt = sys.argv[2] if len(sys.argv) > 2 else PROMPT
    # the drafter copies what has followed the same words before; drafter="none" decodes plainly and gives the same text
    engine = Engine.from_pretrained(model, drafter="ngram")
    # a list of messages goes through the model's chat template; a string would be gone on from as it is
    messages = [{"role": "user", "content": prompt}]
    for delta in engine.stream(messages, SamplingParams(max_tokens=64)):
        print(delta.text, end="", flush=True)
    stats = delta.stats
    assert stats is not None, "the last piece carries the figures"
    print(f"\n\n{stats.tokens_per_second:.1f} tokens/s, mean accept length {stats.mean_accept_length:.2f}")


if __name__ == "__main__":
    main()
