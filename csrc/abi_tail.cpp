// The C ABI of relaxed acceptance and of rejection: arguments are checked here, the work is in cpu/.
#include <algorithm>
#include <cstdint>

#include "abi_check.h"
#include "common/rule.h"
#include "cpu/pivot.h"
#include "cpu/rejection.h"
#include "cpu/relaxed.h"
#include "cpu/row_stats.h"
#include "pad.h"

using pad::check_parents;
using pad::check_pointers;
using pad::check_roots;
using pad::check_size;
using pad::check_vocab;
using pad::check_weights;
using pad::fail;
using pad::path_status;

namespace {

// How many thresholds a kind reads.
uint32_t num_thresholds(uint32_t kind) { return kind == PAD_RULE_BASE ? 0 : kind == PAD_RULE_TYPICAL ? 2 : 1; }

pad_status check_rule(const char *name, const pad_rule &rule) {
    if (rule.kind > PAD_RULE_FLY_RELEASED)
        return fail(PAD_ERROR_ARGUMENT, "%s: the rule's kind must be a pad_rule_kind, got %lu", name,
                    static_cast<unsigned long>(rule.kind));
    for (uint32_t k = 0; k < num_thresholds(rule.kind); ++k)
        if (rule.threshold[k] != rule.threshold[k])
            return fail(PAD_ERROR_ARGUMENT, "%s: threshold %lu of the rule is NaN", name,
                        static_cast<unsigned long>(k));
    if (rule.log_floor != rule.log_floor)
        return fail(PAD_ERROR_ARGUMENT, "%s: the rule's log_floor is NaN; -inf means that there is none", name);
    const float t0 = rule.threshold[0];
    if (rule.kind == PAD_RULE_TOPK && t0 != 1.0f && t0 != 2.0f && t0 != 3.0f)
        return fail(PAD_ERROR_ARGUMENT, "%s: k of PAD_RULE_TOPK must be 1, 2 or 3, got %g", name,
                    static_cast<double>(t0));
    if (rule.outer_floor > 1)
        return fail(PAD_ERROR_ARGUMENT, "%s: the rule's outer_floor must be 0 or 1, got %lu", name,
                    static_cast<unsigned long>(rule.outer_floor));
    if (rule.max_overrides > 0 && (rule.window < 1 || rule.window > 64))
        return fail(PAD_ERROR_ARGUMENT, "%s: the rule's window must be in [1, 64], got %lu", name,
                    static_cast<unsigned long>(rule.window));
    return PAD_OK;
}

pad_status check_judged(const char *name, const pad_judged &judged, uint32_t kind) {
    if (kind == PAD_RULE_PIVOT && !judged.pivot_prob)
        return fail(PAD_ERROR_ARGUMENT, "%s: PAD_RULE_PIVOT needs pivot_prob", name);
    return check_pointers(name, judged.top_id, judged.top_logit, judged.lse, judged.entropy, judged.token_logit);
}

// The one root in front, and tokens that may index a row.
pad_status check_tree(const char *name, const int32_t *token, const int32_t *parent, size_t n) {
    if (n == 0)
        return fail(PAD_ERROR_ARGUMENT, "%s: n must be at least 1", name);
    if (const pad_status status = check_size(name, n))
        return status;
    if (const pad_status status = check_parents(name, parent, n))
        return status;
    for (size_t i = 1; i < n; ++i) {
        if (parent[i] < 0)
            return fail(PAD_ERROR_ARGUMENT, "%s: row %zu is a second root; one sequence has one", name, i);
        if (token[i] < 0)
            return fail(PAD_ERROR_ARGUMENT, "%s: the token of row %zu must not be negative, got %ld", name, i,
                        static_cast<long>(token[i]));
    }
    return PAD_OK;
}

} // namespace

extern "C" {

pad_status pad_row_stats(const float *logits, size_t rows, size_t vocab, size_t row_stride, int32_t *top_id,
                         float *top_logit, float *lse, float *entropy, float *margin) {
    constexpr const char *name = "pad_row_stats";
    if (rows == 0)
        return PAD_OK;
    pad_status status = check_vocab(name, vocab, 3);
    if (!status)
        status = check_pointers(name, logits, top_id, top_logit, lse, entropy, margin);
    if (status)
        return status;
    const pad::StatsOut out = {top_id, top_logit, lse, entropy, margin, nullptr};
    const size_t bad = pad::row_stats(logits, rows, vocab, row_stride, out);
    if (bad < rows)
        return fail(PAD_ERROR_NONFINITE, "row %zu of the logits has a NaN or an infinite value, or no finite one", bad);
    return PAD_OK;
}

pad_status pad_gather_judged(const int32_t *row_top_id, const float *row_top_logit, const float *row_lse,
                             const float *row_entropy, const float *logits, size_t vocab, size_t row_stride,
                             const int32_t *token, const int32_t *parent, size_t n, int32_t *top_id, float *top_logit,
                             float *lse, float *entropy, float *token_logit) {
    constexpr const char *name = "pad_gather_judged";
    if (n == 0)
        return PAD_OK;
    pad_status status = check_vocab(name, vocab, 1);
    if (!status)
        status = check_pointers(name, row_top_id, row_top_logit, row_lse, row_entropy, logits, token, parent, top_id,
                                top_logit, lse, entropy, token_logit);
    if (!status)
        status = check_size(name, n);
    if (!status)
        status = check_parents(name, parent, n);
    if (status)
        return status;
    const pad_judged rows = {row_top_id, row_top_logit, row_lse, row_entropy, nullptr, nullptr};
    const pad::StatsOut out = {top_id, top_logit, lse, entropy, nullptr, token_logit};
    pad::gather_judged(rows, logits, vocab, row_stride, token, parent, n, out);
    return PAD_OK;
}

pad_status pad_pivot_mlp(const pad_pivot_weights *weights, const float *hidden, size_t hidden_stride,
                         const float *scalars, size_t n, float *pivot_prob) {
    constexpr const char *name = "pad_pivot_mlp";
    if (n == 0)
        return PAD_OK;
    pad_status status = check_pointers(name, weights, hidden, pivot_prob);
    if (!status)
        status = check_weights(name, *weights);
    if (!status && weights->num_scalars > 0)
        status = check_pointers(name, scalars);
    if (!status)
        pad::pivot_mlp(*weights, hidden, hidden_stride, scalars, n, pivot_prob);
    return status;
}

pad_status pad_linear_judge(const float *weight, float bias, const float *hidden, size_t hidden_size,
                            size_t hidden_stride, size_t n, float *pivot_prob) {
    constexpr const char *name = "pad_linear_judge";
    if (n == 0)
        return PAD_OK;
    if (hidden_size == 0)
        return fail(PAD_ERROR_ARGUMENT, "%s: hidden_size must be at least 1", name);
    const pad_status status = check_pointers(name, weight, hidden, pivot_prob);
    if (!status)
        pad::linear_judge(weight, bias, hidden, hidden_size, hidden_stride, n, pivot_prob);
    return status;
}

pad_status pad_relaxed_path(const pad_rule *rule, const int32_t *token, const int32_t *parent, const int32_t *row_pick,
                            const uint64_t *tree_mask_bits, const int32_t *depth, const int32_t *seq,
                            const pad_judged *judged, size_t n, size_t num_roots, const uint64_t *history,
                            uint64_t *kept, int32_t *path, int32_t *path_length, int32_t *end_token,
                            uint8_t *overridden) {
    constexpr const char *name = "pad_relaxed_path";
    pad_status status = check_pointers(name, rule);
    if (!status)
        status = check_rule(name, *rule);
    if (status || (n == 0 && num_roots == 0))
        return status;
    if (n > pad::MAX_FOREST)
        return fail(PAD_ERROR_ARGUMENT, "%s: n must be at most 64, got %zu", name, n);
    status = check_pointers(name, token, parent, row_pick, tree_mask_bits, depth, seq, judged, kept, path, path_length,
                            end_token, overridden);
    if (!status)
        status = check_judged(name, *judged, rule->kind);
    if (!status)
        status = check_parents(name, parent, n);
    if (!status)
        status = check_roots(name, depth, n, num_roots);
    if (status)
        return status;
    const pad::ForestRows forest = {token, parent, row_pick, tree_mask_bits, depth, seq, n, num_roots};
    const size_t bad =
        pad::relaxed_path(*rule, forest, *judged, history, kept, path, path_length, end_token, overridden);
    return path_status(name, bad, n);
}

uint64_t pad_override_history(uint64_t history, size_t emitted, uint64_t bits) {
    // a shift by 64 is not defined
    return emitted >= 64 ? bits : history << emitted | (bits & pad::low_bits(static_cast<uint32_t>(emitted)));
}

pad_status pad_rejection_path(const float *logits, size_t vocab, size_t row_stride, const float *q, size_t q_vocab,
                              size_t q_stride, const int32_t *token, const int32_t *parent, size_t n,
                              double temperature, uint64_t seed, uint32_t position, uint32_t round, double *work,
                              int32_t *path, int32_t *path_length, int32_t *end_token) {
    constexpr const char *name = "pad_rejection_path";
    pad_status status = check_vocab(name, vocab, 1);
    if (!status)
        status = check_pointers(name, logits, token, parent, work, path, path_length, end_token);
    if (!status)
        status = check_tree(name, token, parent, n);
    if (status)
        return status;
    if (q && (q_vocab == 0 || q_vocab > INT32_MAX))
        return fail(PAD_ERROR_ARGUMENT, "%s: q_vocab must be in [1, 2^31 - 1], got %zu", name, q_vocab);
    if (!(temperature >= 0.0 && temperature <= double(PAD_MAX_TEMPERATURE)))
        return fail(PAD_ERROR_ARGUMENT, "%s: temperature must be in [0, 1e30], got %g", name, temperature);
    const pad::RejectionRows rows = {logits, vocab, row_stride, q, q_vocab, q_stride};
    const pad::RejectionDraw draw = {temperature, seed, position, round};
    *end_token = pad::rejection_path(rows, token, parent, n, draw, work, path, path_length);
    if (*end_token < 0)
        return fail(PAD_ERROR_NONFINITE, "row %ld of the logits has a NaN or an infinite value, or no finite one",
                    static_cast<long>(path[*path_length - 1]));
    return PAD_OK;
}

} // extern "C"
