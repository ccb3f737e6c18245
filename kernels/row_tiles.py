"""The inner product that every fused kernel of a pass shares: some rows of a weight matrix with all rows of the pass.

A pass has 1 to 64 rows, so its products cost the reading of the weights. For one row the product is a reduction on the
ordinary cores; for more the weights' rows lie on the tensor core's M side and the pass's rows on its N side, so the
weights stream through once whatever the number of rows. Either way a program asks for its first weights, which depend
on nothing, before it waits for the kernel that makes its input (programmatic dependent launch): the memory stays busy
while one kernel ends and the next begins.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pad_engine.kernels.byte_weights import digit_sums, digits, exactly, four_numbers, quarters

# Programmatic dependent launch: not at all; early, so that the next kernel may start when this one does, and the one
# behind it too; or late, when this one has its input, so that one kernel waits at a time.
OFF, EARLY, LATE = 0, 1, 2


@triton.jit
def release_dependents(PDL: tl.constexpr):
    """Let the next kernel of the stream start, up to its own wait."""
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Until here nothing may be read that an earlier kernel of the same graph writes, and nothing written."""
    if PDL:
        gdc_wait()
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, nbytes):
    """Ask for nbytes from each pointer on, to be brought to L2, and go on. Both are multiples of 16; none for 0."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(
    w_ptr, weight_rows, k_begin, k_end, K, BLOCK: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr
):
    """Ask for the first PREFETCH columns of some rows of a matrix `[., K]`, to be brought to L2, and go on.

    weight_rows: `[spread(BLOCK, THREADS)]`, each row as often as it has segments: every thread asks for one segment.
    """
    SEGMENTS: tl.constexpr = segments(BLOCK, THREADS)
    COLUMNS: tl.constexpr = PREFETCH // SEGMENTS
    ITEM: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    start = k_begin + (tl.arange(0, BLOCK * SEGMENTS) % SEGMENTS) * COLUMNS
    prefetch(w_ptr + weight_rows.to(tl.int64) * K + start, tl.minimum(COLUMNS, k_end - start) * ITEM)


@triton.constexpr_function
def segments(block, threads):
    """Into how many segments a prefetched row is cut, so that every thread has one."""
    return max(1, threads // block)


@triton.jit
def weight_tile(w_ptr, weight_rows, row_ok, k, k_end, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """`[BLOCK, BLOCK_K]` of a matrix `[., K]`. Weights are read once a pass, so they leave the cache first."""
    columns = k + tl.arange(0, BLOCK_K)
    # eight neighbours a thread at most, also of one byte: as x comes, which would else change hands at every step
    pointers = tl.max_contiguous(w_ptr + weight_rows.to(tl.int64)[:, None] * K + columns[None, :], [1, 8])
    mask = row_ok[:, None] if EVEN_K else row_ok[:, None] & (columns < k_end)[None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def row_scales(scale_ptr, weight_rows, row_ok):
    """fp32 `[BLOCK]`: what the sums of quantised rows are multiplied with; one for others. Like the weights they depend
    on nothing, and so are read beside them and not behind the sum."""
    if scale_ptr is None:
        return tl.full(weight_rows.shape, 1.0, tl.float32)
    else:
        return tl.load(scale_ptr + weight_rows, mask=row_ok, other=0.0)


@triton.jit
def row_tile(x_ptr, columns, k_end, EVEN_K: tl.constexpr):
    """Elements `columns` of a row, or of rows of pointers `[ROWS, 1]`; zero from k_end on."""
    if EVEN_K:
        return tl.load(x_ptr + columns)
    else:
        return tl.load(x_ptr + columns, mask=columns < k_end, other=0.0)


@triton.jit
def one_row_product(
    w,
    x_ptr,
    norm_ptr,
    w_ptr,
    weight_rows,
    row_ok,
    k_begin,
    k_end,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP: tl.constexpr,
):
    """fp32 `[BLOCK]`: weights `[BLOCK of ., k_begin:k_end]` times x, or x times a norm's weight; and the sum of x^2.

    w: the first one_row_tile of weights, which the caller has read before it waited for x. norm_ptr: `[K]`, or None.
    """
    columns = tl.arange(0, BLOCK_K)
    x, squares = normed_row(x_ptr, norm_ptr, k_begin + columns, k_end, EVEN_K)
    sums = group_sums(w, x, GROUP)
    # an unrolled loop whose start lies behind its end would run: a split that has no share has none here either
    begin = k_begin + BLOCK_K
    for k in tl.range(begin, tl.maximum(begin, k_end), BLOCK_K, loop_unroll_factor=UNROLL):
        w = one_row_tile(w_ptr, x_ptr, weight_rows, row_ok, k, k_end, K, BLOCK_K, EVEN_K, GROUP)
        x, more_squares = normed_row(x_ptr, norm_ptr, k + columns, k_end, EVEN_K)
        squares += more_squares
        sums += group_sums(w, x, GROUP)
    return tl.sum(sums, 1), tl.sum(squares, 0)


@triton.jit
def one_row_tile(
    w_ptr,
    x_ptr,
    weight_rows,
    row_ok,
    k,
    k_end,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of weights for one row x: as they are, or, of int8 beside an x of two bytes, in words of four, which
    digits() are multiplied with. What that loses of x is less than x's own rounding. The words come without mask and
    hint, which are a sixth of the instructions: the first row stands in for rows that there are none of."""
    if w_ptr.dtype.element_ty == tl.int8 and x_ptr.dtype.element_ty != tl.float32 and GROUP == 8:
        rows = tl.where(row_ok, weight_rows, 0).to(tl.int64)[:, None]
        word_ptr, first, end, row_words = w_ptr.to(tl.pointer_type(tl.int32)), k // 4, k_end // 4, K // 4
        columns = (first + tl.arange(0, BLOCK_K // 4))[None, :]
        words = tl.max_contiguous(word_ptr + rows * row_words + columns, [1, 2])  # as many in a thread as of x
        if EVEN_K:
            return tl.load(words)
        else:
            return tl.load(words, mask=columns < end, other=0.0)
    else:
        return weight_tile(w_ptr, weight_rows, row_ok, k, k_end, K, BLOCK_K, EVEN_K)


@triton.jit
def normed_row(x_ptr, norm_ptr, columns, k_end, EVEN_K: tl.constexpr):
    """fp32 `[len(columns)]`: x, times a norm's weight if there is one; and the squares of x."""
    x = row_tile(x_ptr, columns, k_end, EVEN_K).to(tl.float32)
    squares = x * x
    if norm_ptr is not None:
        x *= row_tile(norm_ptr, columns, k_end, EVEN_K).to(tl.float32)
    return x, squares


@triton.jit
def group_sums(w, x, GROUP: tl.constexpr):
    """One_row_tile times x `[BLOCK_K]`: fp32 `[BLOCK, BLOCK_K / GROUP]`. GROUP: neighbours whose products are added at
    once, 1 or what a thread holds side by side: fewer running sums leave registers free for more programs on a core."""
    BLOCK: tl.constexpr = w.shape[0]
    PARTS: tl.constexpr = x.shape[0] // GROUP
    if w.dtype == tl.int32:
        high, low, unit = digits(x)
        return digit_sums(w, high, low).to(tl.float32) * unit
    else:
        products = exactly(w, tl.float32) * x[None, :]
        return products if GROUP == 1 else tl.sum(tl.reshape(products, (BLOCK, PARTS, GROUP)), 2)


@triton.jit
def many_row_product(
    x_ptr,
    w_ptr,
    weight_rows,
    row_ok,
    k_begin,
    k_end,
    K,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 `[BLOCK, ROWS]`: weights `[BLOCK of ., k_begin:k_end]` times x `[ROWS, k_begin:k_end]` transposed.

    x and weights have rows of K elements. EVEN_K: the range is a multiple of BLOCK_K. Weights of one byte come four a
    word, and K and k_begin are multiples of four. A product does not care in which order its columns are added, so each
    byte of the words is multiplied with the columns that have its place, and no byte changes hands.
    """
    columns = tl.arange(0, BLOCK_K)
    precision: tl.constexpr = "ieee" if x_ptr.dtype.element_ty == tl.float32 else "tf32"
    x_rows = x_ptr + tl.arange(0, ROWS)[:, None] * K
    acc = tl.zeros((BLOCK, ROWS), tl.float32)
    if w_ptr.dtype.element_ty.primitive_bitwidth == 8:
        word_ptr = w_ptr.to(tl.pointer_type(tl.int32))
        for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
            words = weight_tile(word_ptr, weight_rows, row_ok, k // 4, k_end // 4, K // 4, BLOCK_K // 4, EVEN_K)
            x = row_tile(x_rows, (k + columns)[None, :], k_end, EVEN_K)
            w_0, w_1, w_2, w_3 = four_numbers(words, w_ptr, x.dtype)
            x_0, x_1, x_2, x_3 = quarters(x)
            acc = tl.dot(w_0, tl.trans(x_0), acc, input_precision=precision)
            acc = tl.dot(w_1, tl.trans(x_1), acc, input_precision=precision)
            acc = tl.dot(w_2, tl.trans(x_2), acc, input_precision=precision)
            acc = tl.dot(w_3, tl.trans(x_3), acc, input_precision=precision)
    else:
        for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
            w = weight_tile(w_ptr, weight_rows, row_ok, k, k_end, K, BLOCK_K, EVEN_K)
            x = row_tile(x_rows, (k + columns)[None, :], k_end, EVEN_K)
            acc = tl.dot(w, tl.trans(x), acc, input_precision=precision)
    return acc


@triton.jit
def lane_tile(
    ptr,
    rows,
    row_ok,
    k,
    k_end,
    K,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    EVEN_K: tl.constexpr,
    POLICY: tl.constexpr,
):
    """`[LANES, rows, BLOCK_K / LANES]` of a matrix `[., K]`: BLOCK_K columns dealt out in LANES ranges."""
    STEP: tl.constexpr = BLOCK_K // LANES
    columns = k + tl.arange(0, LANES)[:, None] * STEP + tl.arange(0, STEP)[None, :]
    pointers = tl.max_contiguous(ptr + rows.to(tl.int64)[None, :, None] * K + columns[:, None, :], [1, 1, 8])
    mask = row_ok[None, :, None] if EVEN_K else row_ok[None, :, None] & (columns < k_end)[:, None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def lane_product(
    w,
    x_ptr,
    w_ptr,
    weight_rows,
    row_ok,
    k_begin,
    k_end,
    K,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    EVEN_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """many_row_product for steps that take much of the reduction: warps share one, each with lanes of columns of its
    own, so that no chain of products is as long as the step. w: the first lane_tile of weights, which the caller has
    read before it waited for x. STEPS: of the range."""
    rows = tl.arange(0, ROWS)
    precision: tl.constexpr = "ieee" if x_ptr.dtype.element_ty == tl.float32 else "tf32"
    acc = tl.zeros((LANES, BLOCK, ROWS), tl.float32)
    for step in tl.static_range(STEPS):
        k = k_begin + step * BLOCK_K
        x = lane_tile(x_ptr, rows, rows < ROWS, k, k_end, K, BLOCK_K, LANES, EVEN_K, "")
        following = w
        if step < STEPS - 1:
            following = lane_tile(
                w_ptr, weight_rows, row_ok, k + BLOCK_K, k_end, K, BLOCK_K, LANES, EVEN_K, "evict_first"
            )
        acc = tl.dot(exactly(w, x.dtype), tl.permute(x, (0, 2, 1)), acc, input_precision=precision)
        w = following
    return tl.sum(acc, 0)


@triton.jit
def square_parts(squares_ptr, ROWS: tl.constexpr, NUM_SQUARES: tl.constexpr, BLOCK_SQUARES: tl.constexpr):
    """fp32 `[BLOCK_SQUARES, ROWS]`: the partial sums of squares that the kernel before left."""
    part, rows = tl.arange(0, BLOCK_SQUARES), tl.arange(0, ROWS)
    return tl.load(squares_ptr + part[:, None] * ROWS + rows[None, :], mask=(part < NUM_SQUARES)[:, None], other=0.0)


@triton.jit
def inverse_rms(squares, K, eps):
    """fp32: 1 / sqrt(mean(x^2) + eps) from sums of squares."""
    return tl.rsqrt(squares / K + eps)


@triton.jit
def add_parts(part_ptr, ticket_ptr, acc, columns, ok, M, ROWS: tl.constexpr, SPLIT_K: tl.constexpr):
    """Store this program's part of the sum; returns whether it was the last of its tile, and then the whole sum."""
    rows = tl.arange(0, ROWS)
    offsets = columns[:, None] * ROWS + rows[None, :]
    tl.store(part_ptr + tl.program_id(1) * M * ROWS + offsets, acc, mask=ok[:, None])
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    ticket = tl.atomic_add(ticket_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
    last = ticket == SPLIT_K - 1
    if last:
        tl.store(ticket_ptr + tl.program_id(0), 0)  # for the next launch
        # from L2: the parts of an earlier launch may still lie in this core's L1
        acc = tl.load(part_ptr + offsets, mask=ok[:, None], cache_modifier=".cg")
        for split in tl.static_range(1, SPLIT_K):
            acc += tl.load(part_ptr + split * M * ROWS + offsets, mask=ok[:, None], cache_modifier=".cg")
    return last, acc
