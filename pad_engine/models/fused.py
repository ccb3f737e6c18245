"""A decoder's pass of 1 to 64 rows as a chain of fused kernels at fixed addresses, ready to be captured.

Six kernels a layer: norm + qkv; attention with rotation and append, by splits of the keys; their parts joined; output
product + residual; norm + gate, up and activation; down product + residual. Gemma has two more, for the norms behind
its blocks. The arithmetic is that of models/decoder.py but for roundings: fp32 inside a kernel, the model's type
between two.
Next to read: kernels/row_tiles.py, then graphs.py.
"""

import torch
from torch import Tensor

from pad_engine.device_round import DeviceForest, SequenceState
from pad_engine.kernels.accept import MAX_ROWS
from pad_engine.kernels.attention_tiles import AttentionWorkspace
from pad_engine.kernels.embed_rows import embed_rows
from pad_engine.kernels.linear import Linear
from pad_engine.kernels.linear_residual import linear_residual
from pad_engine.kernels.lm_head import Judging, lm_head, lm_head_programs
from pad_engine.kernels.norm_gated import norm_gated
from pad_engine.kernels.norm_linear import norm_linear
from pad_engine.kernels.post_norm import post_norm
from pad_engine.kernels.row_tiles import OFF
from pad_engine.kernels.tree_attention import tree_attention
from pad_engine.kernels.tuning import TileConfig, attention_config, release_mode, tile_config
from pad_engine.kv_cache import KVCache
from pad_engine.models.decoder import Decoder, Layer

ROW_PADS = (1, 16, 32, 64)  # rows that a kernel is compiled for
SPLIT_OPS = ("qkv", "out", "down")  # products whose reduction may be split


def row_pad(rows: int) -> int:
    """The rows that a pass of so many is padded to."""
    return next(pad for pad in ROW_PADS if rows <= pad)


class FusedPass:
    """The kernels of one decoder on one cache, for every padded number of rows.

    strict: a row's bits do not depend on the number of rows in its pass (docs/design.md): all passes are padded to
    the same rows, and keys stand at absolute places. pdl: programmatic dependent launch (row_tiles.py); by default what
    was measured to be best, on cards that have it.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, num_tokens: int, strict: bool = False, pdl: int | None = None
    ) -> None:
        self.decoder, self.cache, self.strict = decoder, cache, strict
        config, device = decoder.config, decoder.device
        # rows of the LM head, and their tokens where these are not the first ids
        self.num_tokens = min(num_tokens, decoder.lm_head.out_features)
        self.head_ids = None if decoder.head_ids is None else decoder.head_ids.int()
        self.cuda = device.type == "cuda"
        can_release = self.cuda and torch.cuda.get_device_capability(device) >= (9, 0)
        width = config.hidden_size
        self.pdl = {rows: release_mode(rows, width, device) if can_release else OFF for rows in ROW_PADS}
        if pdl is not None:
            self.pdl = dict.fromkeys(ROW_PADS, pdl)
        self.cores = torch.cuda.get_device_properties(device).multi_processor_count if self.cuda else 1
        self.qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.shapes = {
            "qkv": (self.qkv_width, width),
            "out": (width, config.num_heads * config.head_dim),
            "gate_up": (2 * config.intermediate_size, width),
            "down": (width, config.intermediate_size),
            "lm_head": (config.vocab_size, width),  # what was measured of the whole serves a part of it
        }
        layer = sum(m * k for op, (m, k) in self.shapes.items() if op != "lm_head")
        self.layer_bytes = layer * (decoder.quantised or decoder.dtype).itemsize
        self.tiles = {(op, rows): self.tile(op, rows) for op in self.shapes for rows in ROW_PADS}
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        itemsize, capacity = decoder.dtype.itemsize, cache.capacity
        self.attention = {rows: attention_config(rows, *heads, device, itemsize, capacity) for rows in ROW_PADS}
        self.allocate()

    def tile(self, op: str, rows: int) -> TileConfig:
        """Launch parameters of one product."""
        decoder = self.decoder
        return tile_config(op, rows, *self.shapes[op], decoder.device, decoder.quantised or decoder.dtype)

    def allocate(self) -> None:
        """Make the buffers that launches of these parameters need."""
        config, device, dtype = self.decoder.config, self.decoder.device, self.decoder.dtype
        width, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim

        def rows_of(columns: int) -> Tensor:
            return torch.zeros(MAX_ROWS, columns, dtype=dtype, device=device)

        self.hidden, self.normed, self.block_out = rows_of(width), rows_of(width), rows_of(width)
        self.qkv, self.attended, self.gated = rows_of(self.qkv_width), rows_of(attended), rows_of(inner)
        # sums of squares of a hidden state, for the producer with the most tiles
        sums = MAX_ROWS * max(-(-width // self.tiles[op, rows].block) for op in ("out", "down") for rows in ROW_PADS)
        self.squares, self.block_squares = torch.zeros(sums, device=device), torch.zeros(sums, device=device)
        split = [(rows, self.shapes[op][0], self.tiles[op, rows]) for op in SPLIT_OPS for rows in ROW_PADS]
        self.parts = torch.empty(max(rows * m * tile.split_k for rows, m, tile in split), device=device)
        tickets = max(-(-m // tile.block) for _, m, tile in split)
        self.tickets = torch.zeros(tickets, dtype=torch.int32, device=device)
        splits = max(attention.splits for attention in self.attention.values())
        self.workspace = AttentionWorkspace(MAX_ROWS, config.num_heads, config.head_dim, splits, device)
        self.programs = {
            rows: lm_head_programs(self.num_tokens, self.tiles["lm_head", rows], self.cores) for rows in ROW_PADS
        }
        scores = max(rows * programs for rows, programs in self.programs.items())
        self.scores = torch.empty(scores, device=device)
        self.ids = torch.empty(scores, dtype=torch.int32, device=device)

    def partials(self, rows: int) -> tuple[Tensor, Tensor]:
        """What the LM head leaves: best scores fp32 `[P, rows]` and their ids."""
        count = self.programs[rows]
        return self.scores[: count * rows].view(count, rows), self.ids[: count * rows].view(count, rows)

    def square_sums(self, buffer: Tensor, rows: int, block: int) -> Tensor:
        """`[tiles, rows]` of a buffer of partial sums of squares."""
        tiles = -(-self.decoder.config.hidden_size // block)
        return buffer[: tiles * rows].view(tiles, rows)

    def to_prefix(self, rows: int) -> bool:
        """Whether a round puts its rows behind the prefix, by position, and not into the scratch: a root alone, which
        will surely be kept, and every chain of strict mode, whose rejected rows are overwritten later."""
        return self.strict or rows == 1

    def launch(
        self,
        rows: int,
        token: Tensor,
        forest: DeviceForest,
        sequences: SequenceState,
        to_prefix: bool,
        logits: Tensor | None = None,
        head: bool = True,
        judging: Judging | None = None,
        tap_layer: int | None = None,
    ) -> None:
        """Queue one pass of `rows` (one of ROW_PADS) padded rows: all layers, and the LM head.

        token: int32, the rows' ids. to_prefix: the rows are chains, and go behind the prefix by position, not to the
        scratch. logits: `[rows, num_tokens]` to be written, or None. head: False where nobody wants what follows.
        judging: what the LM head leaves beside its picks; its tap is written behind layer tap_layer.
        """
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        down_block = self.tiles["down", rows].block
        squares = self.square_sums(self.squares, rows, down_block)
        hidden, normed = self.hidden[:rows], self.normed[:rows]
        # the first kernel waits for whatever queued the forest by an ordinary dependency: later ones may then read the
        # forest and the lengths ahead of their own wait
        embed_rows(
            token[:rows], decoder.embedding, decoder.embed_scale, hidden, decoder.layers[0].attention_norm, normed,
            squares, down_block, OFF,
        )  # fmt: skip
        for position, layer in enumerate(decoder.layers):
            self._attention(rows, position, layer, forest, sequences, to_prefix)
            following = decoder.layers[position + 1].attention_norm if position + 1 < len(decoder.layers) else None
            tap = judging.tap.rows if judging and judging.tap and tap_layer == layer.index else None
            self._mlp(rows, layer, decoder.final_norm if following is None else following, tap)
        if not head:
            return
        scores, ids = self.partials(rows)
        lm_head(
            hidden, decoder.final_norm, normed, squares, decoder.lm_head.weight, decoder.lm_head.scale, forest.depth,
            forest.seq, sequences.cache_len, sequences.seed, sequences.temperature, scores, ids, logits,
            judging, num_tokens=self.num_tokens, row_ids=self.head_ids, eps=eps,
            softcap=decoder.config.logit_softcap, config=self.tiles["lm_head", rows], pdl=self.pdl[rows],
        )  # fmt: skip

    def _attention(
        self, rows: int, position: int, layer: Layer, forest: DeviceForest, sequences: SequenceState, to_prefix: bool
    ) -> None:
        config, cache, pdl = self.decoder.config, self.cache, self.pdl[rows]
        squares = self.square_sums(self.squares, rows, self.tiles["down", rows].block)
        norm_linear(
            self.hidden[:rows], layer.attention_norm, self.normed[:rows], squares, layer.qkv.weight, layer.qkv.bias,
            layer.qkv.scale, self.qkv[:rows], self.parts, self.tickets, config.rms_norm_eps, self.tiles["qkv", rows],
            pdl,
        )  # fmt: skip
        window, index = cache.layers[position]
        table = self.decoder.ropes[config.ropes[layer.index]].table
        assert table is not None, "a rotary table that does not depend on the length"
        tree_attention(
            self.qkv[:rows], cache.buffers[window][index], self.attended[:rows], self.workspace, forest.depth,
            forest.mask_bits, forest.seq, forest.start, sequences.cache_len, table[0], table[1], layer.q_norm,
            layer.k_norm, eps=config.rms_norm_eps, scale=config.attention_scale, softcap=config.attention_softcap,
            scratch=cache.scratch, capacity=cache.capacity, window=window, heads=config.num_heads,
            config=self.attention[rows], to_prefix=to_prefix, strict=self.strict, pdl=pdl,
        )  # fmt: skip
        self._residual("out", rows, self.attended, layer.out, layer.attention_post_norm, layer.mlp_norm)

    def _mlp(self, rows: int, layer: Layer, next_norm: Tensor, tap: Tensor | None) -> None:
        config = self.decoder.config
        squares = self.square_sums(self.squares, rows, self.tiles["out", rows].block)
        norm_gated(
            self.hidden[:rows], layer.mlp_norm, self.normed[:rows], squares, layer.gate_up.weight, layer.gate_up.bias,
            layer.gate_up.scale, self.gated[:rows], config.rms_norm_eps, config.hidden_act,
            self.tiles["gate_up", rows], self.pdl[rows],
        )  # fmt: skip
        self._residual("down", rows, self.gated, layer.down, layer.mlp_post_norm, next_norm, tap)

    def _residual(
        self,
        op: str,
        rows: int,
        x: Tensor,
        linear: Linear,
        post_weight: Tensor | None,
        next_norm: Tensor,
        tap: Tensor | None = None,
    ) -> None:
        """The product at the end of a block, the norm behind it if there is one, and the residual; tap: a copy of
        it."""
        tile, pdl = self.tiles[op, rows], self.pdl[rows]
        squares = self.square_sums(self.squares, rows, tile.block)
        hidden, normed, y = self.hidden[:rows], self.normed[:rows], self.block_out[:rows]
        if post_weight is None:
            linear_residual(
                x[:rows], linear.weight, linear.bias, linear.scale, hidden, next_norm, normed, squares, self.parts,
                self.tickets, tile, pdl, tap=tap,
            )  # fmt: skip
            return
        own = self.square_sums(self.block_squares, rows, tile.block)
        linear_residual(
            x[:rows], linear.weight, linear.bias, linear.scale, y, None, normed, own, self.parts, self.tickets, tile,
            pdl, add=False,
        )  # fmt: skip
        eps = self.decoder.config.rms_norm_eps
        post_norm(y, own, post_weight, hidden, next_norm, normed, squares, eps, tile.block, pdl, tap)


def unsupported(decoder: Decoder) -> str | None:
    """Why this decoder cannot run fused, or None."""
    if decoder.dynamic:
        return "its rotary frequencies depend on the length of the sequence"
    if decoder.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its type is {decoder.dtype}"
    c = decoder.config
    if decoder.quantised and any(n % 4 for n in (c.hidden_size, c.num_heads * c.head_dim, c.intermediate_size)):
        return "its quantised rows are not whole words of four bytes"
    return None


def unsupported_strict(cache: KVCache, branching: bool, taps: bool) -> str | None:
    """Why rows cannot be made independent of their pass, or None."""
    if branching:
        return "trees with branches have no absolute places; choose trees=chain"
    if taps:
        return "a drafter that taps hidden states is served by other kernels"
    if any(window is not None and window < cache.capacity for window in cache.buffers):
        return "a ring of keys has no room for rows that may yet be rejected; choose max_length within the window"
    return None
