// The C ABI: arguments are checked and errors worded here; the work is in cpu/. Next file: abi_tail.cpp, the functions
// of relaxed acceptance.
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "abi_check.h"
#include "cpu/accept.h"
#include "cpu/commit.h"
#include "cpu/gumbel.h"
#include "cpu/philox.h"
#include "pad.h"

namespace {

thread_local char last_error[256] = "";

} // namespace

namespace pad {

pad_status fail(pad_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

pad_status check_size(const char *name, size_t n) {
    if (n > INT32_MAX)
        return fail(PAD_ERROR_ARGUMENT, "%s: n must be at most 2^31 - 1, got %zu", name, n);
    return PAD_OK;
}

pad_status check_parents(const char *name, const int32_t *parent, size_t n) {
    for (size_t i = 0; i < n; ++i)
        if (parent[i] < -1 || parent[i] >= int64_t(i))
            return fail(PAD_ERROR_ARGUMENT, "%s: the parent of row %zu must be an earlier row, or -1, got %ld", name, i,
                        static_cast<long>(parent[i]));
    return PAD_OK;
}

pad_status check_roots(const char *name, const int32_t *depth, size_t n, size_t num_roots) {
    const auto found = static_cast<size_t>(std::count(depth, depth + n, 0));
    if (found != num_roots)
        return fail(PAD_ERROR_ARGUMENT, "%s: num_roots is %zu, but %zu rows have depth 0", name, num_roots, found);
    return PAD_OK;
}

pad_status path_status(const char *name, size_t bad, size_t n) {
    if (bad < n)
        return fail(PAD_ERROR_ARGUMENT,
                    "%s: row %zu fits no path: a sequence's rows lie side by side behind one root of depth 0, "
                    "which is kept, and at most one child a node is kept",
                    name, bad);
    return PAD_OK;
}

pad_status check_vocab(const char *name, size_t vocab, size_t least) {
    if (vocab < least || vocab > INT32_MAX)
        return fail(PAD_ERROR_ARGUMENT, "%s: vocab must be in [%zu, 2^31 - 1], got %zu", name, least, vocab);
    return PAD_OK;
}

pad_status check_slots(const char *name, size_t scratch, size_t ring) {
    if (ring == 0 || ring > INT32_MAX || scratch > INT32_MAX - ring)
        return fail(PAD_ERROR_ARGUMENT,
                    "%s: ring must be at least 1 and scratch + ring at most 2^31 - 1, got %zu and %zu", name, ring,
                    scratch);
    return PAD_OK;
}

pad_status check_weights(const char *name, const pad_pivot_weights &w) {
    if (w.hidden_size == 0)
        return fail(PAD_ERROR_ARGUMENT, "%s: hidden_size must be at least 1", name);
    if (w.num_scalars > 0 && !w.scalars_weight)
        return fail(PAD_ERROR_ARGUMENT, "%s: scalars_weight must not be null with %lu scalars", name,
                    static_cast<unsigned long>(w.num_scalars));
    return check_pointers(name, w.hidden_weight, w.hidden_bias, w.scalars_bias, w.layer1_weight, w.layer1_bias,
                          w.layer2_weight, w.layer2_bias);
}

} // namespace pad

using pad::check_parents;
using pad::check_roots;
using pad::check_size;
using pad::fail;
using pad::path_status;

extern "C" {

uint32_t pad_abi_version(void) { return PAD_ABI_VERSION; }

const char *pad_version(void) { return PAD_VERSION; }

const char *pad_last_error(void) { return last_error; }

pad_status pad_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    if (!counter || !key || !out)
        return fail(PAD_ERROR_ARGUMENT, "pad_philox4x32_10: counter, key and out must not be null");
    pad::philox4x32_10(counter, key, out);
    return PAD_OK;
}

pad_status pad_gumbel(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t round, uint32_t first_token,
                      size_t n, float *out) {
    if (n == 0)
        return PAD_OK;
    if (!out)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel: out must not be null");
    if (n - 1 > UINT32_MAX - first_token)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel: first_token %lu + n %zu is past the last 32-bit token id",
                    static_cast<unsigned long>(first_token), n);
    pad::gumbel(seed, position, purpose, round, first_token, n, out);
    return PAD_OK;
}

pad_status pad_gumbel_pick(const float *logits, size_t rows, size_t vocab, size_t row_stride, const uint32_t *positions,
                           uint64_t seed, float temperature, int32_t *out_id) {
    if (rows == 0)
        return PAD_OK;
    if (vocab == 0 || vocab > INT32_MAX)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel_pick: vocab must be in [1, 2^31 - 1], got %zu", vocab);
    if (!logits || !positions || !out_id)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel_pick: logits, positions and out_id must not be null");
    if (!(temperature >= 0.0f && temperature <= PAD_MAX_TEMPERATURE))
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel_pick: temperature must be in [0, 1e30], got %g",
                    static_cast<double>(temperature));
    const size_t bad = pad::gumbel_pick(logits, rows, vocab, row_stride, positions, seed, temperature, out_id);
    if (bad < rows)
        return fail(PAD_ERROR_NONFINITE, "row %zu of the logits has a NaN or an infinite value, or no finite one", bad);
    return PAD_OK;
}

pad_status pad_accept_match(const int32_t *token, const int32_t *parent, const int32_t *row_pick, size_t n,
                            uint8_t *accept) {
    if (n == 0)
        return PAD_OK;
    if (!token || !parent || !row_pick || !accept)
        return fail(PAD_ERROR_ARGUMENT, "pad_accept_match: token, parent, row_pick and accept must not be null");
    pad_status status = check_size("pad_accept_match", n);
    if (!status)
        status = check_parents("pad_accept_match", parent, n);
    if (!status)
        pad::accept_match(token, parent, row_pick, n, accept);
    return status;
}

pad_status pad_accept_bits(const uint8_t *accept, const float *score, const int32_t *parent, size_t n, uint64_t *kept) {
    if (n == 0)
        return PAD_OK;
    if (!accept || !parent || !kept)
        return fail(PAD_ERROR_ARGUMENT, "pad_accept_bits: accept, parent and kept must not be null");
    pad_status status = check_size("pad_accept_bits", n);
    if (!status)
        status = check_parents("pad_accept_bits", parent, n);
    if (!status)
        pad::accept_bits(accept, score, parent, n, kept);
    return status;
}

pad_status pad_accept_path(const uint64_t *tree_mask_bits, const uint64_t *kept, const int32_t *depth,
                           const int32_t *seq, size_t n, size_t num_roots, int32_t *path, int32_t *path_length) {
    constexpr const char *name = "pad_accept_path";
    if (n == 0 && num_roots == 0)
        return PAD_OK;
    if (!tree_mask_bits || !kept || !depth || !seq || !path || !path_length)
        return fail(PAD_ERROR_ARGUMENT, "%s: no pointer may be null", name);
    pad_status status = check_size(name, n);
    if (!status)
        status = check_roots(name, depth, n, num_roots);
    if (!status)
        status = path_status(name, pad::accept_path(tree_mask_bits, kept, depth, seq, n, path, path_length), n);
    return status;
}

pad_status pad_match_path(const int32_t *token, const int32_t *parent, const int32_t *row_pick,
                          const uint64_t *tree_mask_bits, const int32_t *depth, const int32_t *seq, size_t n,
                          size_t num_roots, uint64_t *kept, int32_t *path, int32_t *path_length, int32_t *end_token) {
    constexpr const char *name = "pad_match_path";
    if (n == 0 && num_roots == 0)
        return PAD_OK;
    if (!token || !parent || !row_pick || !tree_mask_bits || !depth || !seq || !kept || !path || !path_length ||
        !end_token)
        return fail(PAD_ERROR_ARGUMENT, "%s: no pointer may be null", name);
    pad_status status = check_size(name, n);
    if (!status)
        status = check_parents(name, parent, n);
    if (!status)
        status = check_roots(name, depth, n, num_roots);
    if (status)
        return status;
    pad::match_bits(token, parent, row_pick, n, kept);
    status = path_status(name, pad::accept_path(tree_mask_bits, kept, depth, seq, n, path, path_length), n);
    for (size_t r = 0, end = 0; !status && r < num_roots; ++r) {
        end += size_t(path_length[r]);
        end_token[r] = row_pick[path[end - 1]];
    }
    return status;
}

pad_status pad_commit_list(const int32_t *rows, size_t num_rows, size_t length, size_t scratch, size_t ring,
                           int32_t *source, int32_t *target) {
    if (num_rows == 0)
        return PAD_OK;
    if (!rows || !source || !target)
        return fail(PAD_ERROR_ARGUMENT, "pad_commit_list: rows, source and target must not be null");
    if (const pad_status status = pad::check_slots("pad_commit_list", scratch, ring))
        return status;
    if (length > INT32_MAX || num_rows > INT32_MAX - length)
        return fail(PAD_ERROR_ARGUMENT, "pad_commit_list: length + num_rows must be at most 2^31 - 1, got %zu and %zu",
                    length, num_rows);
    for (size_t i = 0; i < num_rows; ++i)
        if (rows[i] < 0 || size_t(rows[i]) >= scratch)
            return fail(PAD_ERROR_ARGUMENT, "pad_commit_list: rows must be in [0, scratch = %zu), got %ld", scratch,
                        static_cast<long>(rows[i]));
    pad::commit_list(rows, num_rows, length, scratch, ring, source, target);
    return PAD_OK;
}

} // extern "C"
