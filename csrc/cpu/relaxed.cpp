#include "relaxed.h"

#include <algorithm>

#include "accept.h"
#include "common/rule.h"

namespace pad {
namespace {

// Which rows are accepted by an override, as bits; accept and score [n] are written, but for roots.
uint64_t judge_all(const pad_rule &rule, const ForestRows &forest, const pad_judged &judged, uint8_t *accept,
                   float *score) {
    uint64_t overridden = 0;
    for (size_t i = 0; i < forest.n; ++i) {
        if (forest.parent[i] < 0)
            continue;
        const Verdict verdict =
            judge(rule, judged, forest.token[i], forest.row_pick[forest.parent[i]], static_cast<uint32_t>(i));
        accept[i] = verdict.accept;
        score[i] = verdict.score;
        overridden |= uint64_t{verdict.overridden} << i;
    }
    return overridden;
}

} // namespace

size_t relaxed_path(const pad_rule &rule, const ForestRows &forest, const pad_judged &judged, const uint64_t *history,
                    uint64_t *kept, int32_t *path, int32_t *path_length, int32_t *end_token, uint8_t *overridden) {
    uint8_t accept[MAX_FOREST] = {};
    float score[MAX_FOREST] = {};
    const size_t n = forest.n;
    const uint64_t by_override = judge_all(rule, forest, judged, accept, score);
    accept_bits(accept, score, forest.parent, n, kept);
    const size_t bad = accept_path(forest.tree_mask_bits, kept, forest.depth, forest.seq, n, path, path_length);
    if (bad < n)
        return bad;
    std::fill_n(overridden, n, uint8_t{0});
    // what a cut leaves out is closed up, so that paths stay side by side
    int32_t *from = path, *to = path;
    for (size_t r = 0; r < forest.num_roots; ++r) {
        const uint32_t length = static_cast<uint32_t>(path_length[r]);
        uint64_t places = 0;
        for (uint32_t d = 0; d < length; ++d)
            places |= (by_override >> from[d] & 1) << d;
        const uint32_t left = cut_path(rule, from, length, places, history ? history[r] : 0, forest.tree_mask_bits,
                                       forest.depth, static_cast<uint32_t>(n));
        for (uint32_t d = 0; d < left; ++d) {
            overridden[from[d]] = places >> d & 1;
            *to++ = from[d];
        }
        from += length;
        path_length[r] = int32_t(left);
        end_token[r] = forest.row_pick[to[-1]];
    }
    return n;
}

} // namespace pad
