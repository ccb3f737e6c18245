#include "accept.h"

#include <algorithm>

#include "common/rule.h"

namespace pad {
namespace {

size_t words_of(size_t n) { return (n + 63) / 64; }

bool has(const uint64_t *bits, size_t i) { return bits[i / 64] >> (i % 64) & 1; }

void flip(uint64_t *bits, size_t i) { bits[i / 64] ^= uint64_t{1} << (i % 64); }

bool matches(const int32_t *token, const int32_t *parent, const int32_t *row_pick, size_t i) {
    return parent[i] < 0 || token[i] == row_pick[parent[i]];
}

// The kept sibling before row i, or i if there is none.
size_t kept_sibling(const int32_t *parent, const uint64_t *kept, size_t i) {
    // siblings lie behind their parent: in a chain there is nothing to look at
    for (size_t j = size_t(parent[i]) + 1; j < i; ++j)
        if (parent[j] == parent[i] && has(kept, j))
            return j;
    return i;
}

// is_accepted(i): the judgement of a row that is no root. takes_place(i, j): whether i takes that of its sibling j.
template <typename IsAccepted, typename TakesPlace>
void keep_best(const int32_t *parent, size_t n, IsAccepted is_accepted, TakesPlace takes_place, uint64_t *kept) {
    std::fill_n(kept, words_of(n), uint64_t{0});
    for (size_t i = 0; i < n; ++i) {
        if (parent[i] >= 0) {
            if (!is_accepted(i))
                continue;
            const size_t sibling = kept_sibling(parent, kept, i);
            if (sibling < i) {
                if (!takes_place(i, sibling))
                    continue;
                flip(kept, sibling);
            }
        }
        flip(kept, i);
    }
}

bool all_kept(const uint64_t *mask, const uint64_t *kept, size_t words) {
    uint64_t missing = 0;
    for (size_t w = 0; w < words; ++w)
        missing |= mask[w] & ~kept[w];
    return missing == 0;
}

} // namespace

void accept_match(const int32_t *token, const int32_t *parent, const int32_t *row_pick, size_t n, uint8_t *accept) {
    for (size_t i = 0; i < n; ++i)
        accept[i] = matches(token, parent, row_pick, i);
}

void accept_bits(const uint8_t *accept, const float *score, const int32_t *parent, size_t n, uint64_t *kept) {
    const auto is_accepted = [=](size_t i) { return accept[i] != 0; };
    const auto takes_place = [=](size_t i, size_t j) { return score && is_better(score[i], score[j]); };
    keep_best(parent, n, is_accepted, takes_place, kept);
}

void match_bits(const int32_t *token, const int32_t *parent, const int32_t *row_pick, size_t n, uint64_t *kept) {
    const auto is_accepted = [=](size_t i) { return matches(token, parent, row_pick, i); };
    keep_best(parent, n, is_accepted, [](size_t, size_t) { return false; }, kept);
}

size_t accept_path(const uint64_t *tree_mask_bits, const uint64_t *kept, const int32_t *depth, const int32_t *seq,
                   size_t n, int32_t *path, int32_t *path_length) {
    const size_t words = words_of(n);
    size_t total = 0, roots = 0;
    for (size_t i = 0; i < n; ++i) {
        const bool is_root = depth[i] == 0;
        const bool follows = i > 0 && seq[i] == seq[i - 1];
        if (is_root == follows)
            return i;
        if (is_root)
            path_length[roots++] = 0;
        int32_t &length = path_length[roots - 1];
        // parents come before children, so the rows of a path are met in the order of their depth
        if (all_kept(tree_mask_bits + i * words, kept, words)) {
            if (depth[i] != length)
                return i;
            path[total++] = int32_t(i);
            ++length;
        } else if (is_root) {
            return i;
        }
    }
    return n;
}

} // namespace pad
