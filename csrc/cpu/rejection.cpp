#include "rejection.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/noise.h"
#include "pad.h"

namespace pad {
namespace {

// One node's distributions over all ids that either side knows: [width] each.
struct Rows {
    double *p, *q; // q is null where nothing was drawn
    size_t width;
};

double sum(const double *row, size_t n) {
    double total = 0.0;
    for (size_t t = 0; t < n; ++t)
        total += row[t];
    return total;
}

// softmax(logits / temperature) into p [width]; at temperature 0 all of it on the first largest. False if not finite.
bool target_probs(const float *logits, size_t vocab, double temperature, double *p, size_t width) {
    constexpr float INF = std::numeric_limits<float>::infinity();
    size_t best = 0;
    bool has_nan = false;
    for (size_t t = 0; t < vocab; ++t) {
        has_nan |= logits[t] != logits[t];
        if (logits[t] > logits[best])
            best = t;
    }
    const float peak = logits[best];
    if (has_nan || !(peak < INF && peak > -INF))
        return false;
    std::fill_n(p, width, 0.0);
    if (temperature == 0.0) {
        p[best] = 1.0;
        return true;
    }
    for (size_t t = 0; t < vocab; ++t)
        p[t] = std::exp((double(logits[t]) - double(peak)) / temperature);
    const double total = sum(p, vocab);
    for (size_t t = 0; t < vocab; ++t)
        p[t] /= total;
    return true;
}

double at(const double *row, size_t width, int32_t token) { return size_t(token) < width ? row[token] : 0.0; }

// norm(max(p - q, 0)), with q one at the token where nothing was drawn; p itself where nothing would be left.
void take_residual(const Rows &rows, int32_t token) {
    // a NaN in q is one in what is left, and so in the total, which leaves p as it is
    const auto left = [&](size_t t) {
        if (!rows.q)
            return t == size_t(token) ? 0.0 : rows.p[t];
        const double difference = rows.p[t] - rows.q[t];
        return difference < 0.0 ? 0.0 : difference;
    };
    double total = 0.0;
    for (size_t t = 0; t < rows.width; ++t)
        total += left(t);
    // nothing left means that p and q were equal but for rounding, where a rejection has no weight
    if (total > 0.0)
        for (size_t t = 0; t < rows.width; ++t)
            rows.p[t] = left(t) / total;
}

// The next sibling is drawn from what is left of q without this one's token.
void drop_from_q(const Rows &rows, int32_t token) {
    if (!rows.q)
        return;
    if (size_t(token) < rows.width)
        rows.q[token] = 0.0;
    const double total = sum(rows.q, rows.width);
    if (total > 0.0)
        for (size_t t = 0; t < rows.width; ++t)
            rows.q[t] /= total;
}

// The argmax of ln p plus the noise of this draw's own, the lowest id at ties.
int32_t draw_token(const Rows &rows, const RejectionDraw &draw, uint32_t position) {
    double best = -std::numeric_limits<double>::infinity();
    int32_t id = -1;
    for (size_t t = 0; t < rows.width; ++t) {
        // the noise costs more than the rest, and after a filter most of a row is impossible
        if (!(rows.p[t] > 0.0))
            continue;
        const uint32_t word = word_of(draw.seed, position, uint32_t(t), PAD_PURPOSE_RESIDUAL, draw.round);
        const double score = std::log(rows.p[t]) + double(gumbel_of(word));
        if (score > best) {
            best = score;
            id = int32_t(t);
        }
    }
    return id;
}

// The first child of `node` that stays, or n; what is left of p is that behind the children before it.
size_t try_children(const Rows &rows, size_t node, const int32_t *token, const int32_t *parent, size_t n,
                    const RejectionDraw &draw, uint32_t position) {
    for (size_t child = node + 1; child < n; ++child) {
        if (parent[child] != int32_t(node))
            continue;
        const int32_t x = token[child];
        const double u = uniform_of(draw.seed, position, uint32_t(x), PAD_PURPOSE_ACCEPT, draw.round);
        const double chance = rows.q ? at(rows.q, rows.width, x) : 1.0;
        // strictly below: a token that the target excludes does not stay at a draw of 0 either
        if (u * chance < at(rows.p, rows.width, x))
            return child;
        take_residual(rows, x);
        drop_from_q(rows, x);
    }
    return n;
}

} // namespace

int32_t rejection_path(const RejectionRows &rows, const int32_t *token, const int32_t *parent, size_t n,
                       const RejectionDraw &draw, double *work, int32_t *path, int32_t *path_length) {
    const size_t width = std::max(rows.vocab, rows.q ? rows.q_vocab : 0);
    size_t node = 0;
    for (int32_t length = 1;; ++length) {
        path[length - 1] = int32_t(node);
        *path_length = length;
        const Rows here = {work, rows.q ? work + width : nullptr, width};
        if (!target_probs(rows.logits + node * rows.row_stride, rows.vocab, draw.temperature, here.p, width))
            return -1;
        if (here.q) {
            std::fill(std::copy_n(rows.q + node * rows.q_stride, rows.q_vocab, here.q), here.q + width, 0.0);
        }
        const uint32_t position = draw.position + uint32_t(length - 1);
        const size_t child = try_children(here, node, token, parent, n, draw, position);
        if (child == n)
            return draw_token(here, draw, position);
        node = child;
    }
}

} // namespace pad
