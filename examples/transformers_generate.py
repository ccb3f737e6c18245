"""transformers' own generate with prompt-lookup drafts, its tokens judged by libpad:

    python examples/transformers_generate.py [model] [rule]

The model is a short name (`pad models`), a folder or a hub id. Prints what each rule writes and how
often the model runs. Next to read: pad_engine/integrations/transformers.py.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pad_engine.integrations.transformers import speculative
from pad_engine.models.sources import resolve

# an answer that repeats much of its prompt, where copying is a good guess
PROMPT = (
    "Translate into simple English, sentence by sentence: The owl left the barn at dusk, crossed the river, and came "
    "back before the farmer woke. The farmer never saw the owl, but he knew that the owl had been there."
)


def main() -> None:
    folder = resolve(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
    relaxed = sys.argv[2] if len(sys.argv) > 2 else "margin:theta=0.9"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    length = inputs["input_ids"].shape[1]
    # None is generate as it is; greedy writes the same with fewer passes, and the relaxed rule may write other words
    for rule in (None, "greedy", relaxed):
        method = None if rule is None else speculative("ngram", rule)
        start = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=64, do_sample=False, custom_generate=method)
        seconds = time.perf_counter() - start
        print(f"--- {rule or 'generate alone'}: {ids.shape[1] - length} tokens in {seconds:.1f} s", end="")
        if method is not None:
            stats = method.stats
            print(f", {stats.rounds} rounds, {stats.overrides} overrides", end="")
        print(f"\n{tokenizer.decode(ids[0, length:], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
