"""The final number of a text, as evaluations of GSM8K take it, in one form: 1,200.00 and $1200 are "1200"."""

import re

MARKER = "####"
# A minus behind a word, a number or a bracket subtracts. Thousands are grouped in threes: "1,2,3" are three numbers.
SIGN = r"(?:(?<![\w.)\]])-\$?|\$-?)?"
NUMBER = re.compile(SIGN + r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)", re.ASCII)
BOXED = re.compile(r"\\boxed\s*\{([^{}]*)")


def final_number(text: str) -> str | None:
    r"""The number after the first "####", else in the last \boxed{}, else the last of the text; None without one.

    The first marker counts, because a model may go on with a question of its own; a marker without a number behind it
    is no answer.
    """
    text = text.replace("\u2212", "-").replace("\\$", "$").replace("{,}", ",")
    _, marker, after = text.partition(MARKER)
    if marker:
        numbers = NUMBER.findall(after.strip().partition("\n")[0])[:1]
    else:
        boxes = [found for box in BOXED.findall(text) if (found := NUMBER.findall(box))]
        numbers = boxes[-1] if boxes else NUMBER.findall(text)
    return plain_number(numbers[-1]) if numbers else None


def plain_number(text: str) -> str:
    """A number without currency and grouping, and without needless zeros."""
    digits = re.sub(r"[$,-]", "", text)
    whole, _, rest = digits.partition(".")
    plain = (whole.lstrip("0") or "0") + f".{rest}".rstrip("0").rstrip(".")
    return f"-{plain}" if "-" in text and plain != "0" else plain
