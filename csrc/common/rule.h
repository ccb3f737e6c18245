// How a rule judges one node, and where it cuts a path: pad_relaxed_path in pad.h, for the CPU and for CUDA kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/hd.h"
#include "pad.h"

namespace pad {

constexpr uint32_t MAX_FOREST = 64; // rows, so that a set of rows is one word

// Rounded once from double precision: single-precision exponentials differ between machines in their last bit.
PAD_HD float exp_rounded(float x) { return float(exp(double(x))); }

// -sum p ln p over the three largest logits z of a row, 0 ln 0 = 0.
PAD_HD float top_entropy(const float *z, float lse) {
    float sum = 0.0f;
    for (int k = 0; k < 3; ++k) {
        const float log_p = z[k] - lse, p = exp_rounded(log_p);
        // not `p > 0`: a NaN must stay one
        if (p != 0.0f)
            sum = sum - p * log_p;
    }
    return sum;
}

// Whether node i may pass although its token is not the target's own.
PAD_HD bool overrides(const pad_rule &rule, const pad_judged &judged, int32_t token, uint32_t i) {
    const int32_t *id = judged.top_id + 3 * i;
    const float *z = judged.top_logit + 3 * i;
    const float lse = judged.lse[i], log_p = judged.token_logit[i] - lse, t0 = rule.threshold[0];
    switch (rule.kind) {
    case PAD_RULE_MARGIN_PAPER:
        return token == id[1] && z[0] > 0.0f && z[1] > t0 * z[0];
    case PAD_RULE_MARGIN_RATIO:
        return token == id[1] && z[1] - z[0] > t0;
    case PAD_RULE_MARGIN_GAP:
        return token == id[1] && exp_rounded(z[0] - lse) - exp_rounded(z[1] - lse) < t0;
    case PAD_RULE_PIVOT:
        return t0 > 0.0f && judged.pivot_prob[i] <= t0;
    case PAD_RULE_TYPICAL:
        return log_p > t0 || log_p + judged.entropy[i] > rule.threshold[1];
    case PAD_RULE_TOPK:
        return (t0 >= 1.0f && token == id[0]) || (t0 >= 2.0f && token == id[1]) || (t0 >= 3.0f && token == id[2]);
    case PAD_RULE_FLY_PAPER:
        return judged.entropy[i] >= t0;
    case PAD_RULE_FLY_RELEASED:
        return top_entropy(z, lse) >= t0;
    default:
        return false;
    }
}

struct Verdict {
    bool accept, overridden;
    float score; // among accepted siblings; NaN is below all
};

// Node i, which is no root; pick: the target's own token in its place, -1 for none.
PAD_HD Verdict judge(const pad_rule &rule, const pad_judged &judged, int32_t token, int32_t pick, uint32_t i) {
    if (pick < 0)
        return {false, false, 0.0f};
    const bool base = token == pick;
    const float log_p = judged.token_logit[i] - judged.lse[i];
    const bool above = log_p >= rule.log_floor;
    const bool accept = base ? !rule.outer_floor || above : above && overrides(rule, judged, token, i);
    if (base || !accept)
        return {accept, false, 2.0f};
    return {true, true, rule.kind == PAD_RULE_PIVOT ? 1.0f - judged.pivot_prob[i] : exp_rounded(log_p)};
}

// Whether a sibling with score a takes the place of one with score b that comes before it.
PAD_HD bool is_better(float a, float b) { return a > b || (b != b && a == a); }

PAD_HD uint64_t low_bits(uint32_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

PAD_HD uint32_t count_bits(uint64_t bits) {
#if defined(__CUDA_ARCH__)
    return uint32_t(__popcll(bits));
#else
    return uint32_t(__builtin_popcountll(bits));
#endif
}

// The greatest depth among a row and its descendants, of n <= 64 rows.
PAD_HD uint32_t subtree_depth(const uint64_t *tree_mask_bits, const int32_t *depth, uint32_t n, uint32_t row) {
    uint32_t deepest = 0;
    for (uint32_t j = row; j < n; ++j)
        if ((tree_mask_bits[j] >> row & 1) && uint32_t(depth[j]) > deepest)
            deepest = uint32_t(depth[j]);
    return deepest;
}

// How many nodes of a path stay. path: its rows, root first, length >= 1. overridden: bit d says that path[d] is there
// by an override. history: as in pad.h.
PAD_HD uint32_t cut_path(const pad_rule &rule, const int32_t *path, uint32_t length, uint64_t overridden,
                         uint64_t history, const uint64_t *tree_mask_bits, const int32_t *depth, uint32_t n) {
    for (uint32_t d = 1; d < length; ++d) {
        const uint64_t is_override = overridden >> d & 1;
        history = history << 1 | is_override;
        if (!is_override)
            continue;
        // compared without sums, which could wrap
        const uint32_t behind = length - 1 - d;
        if (rule.lookahead > behind || (overridden >> d >> 1 & low_bits(rule.lookahead)) != 0)
            return d;
        if (rule.reach > 0 && rule.reach > subtree_depth(tree_mask_bits, depth, n, uint32_t(path[d])) - d)
            return d;
        if (rule.max_overrides > 0 && count_bits(history & low_bits(rule.window)) > rule.max_overrides)
            return d;
    }
    return length;
}

} // namespace pad
