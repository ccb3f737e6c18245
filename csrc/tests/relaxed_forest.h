/* A small forest, the numbers of its nodes, and a rule on them. */
#ifndef RELAXED_FOREST_H
#define RELAXED_FOREST_H

#include <math.h>
#include <string.h>

#include "pad.h"

enum { MAX_N = 64 };

/* a chain of n rows whose tokens are no row's pick; then the tests change what they need */
typedef struct {
    size_t n, num_roots;
    int32_t token[MAX_N], parent[MAX_N], row_pick[MAX_N], depth[MAX_N], seq[MAX_N];
    uint64_t mask[MAX_N], history[2];
    int32_t top_id[3 * MAX_N];
    float top_logit[3 * MAX_N], lse[MAX_N], entropy[MAX_N], token_logit[MAX_N], pivot_prob[MAX_N];
} forest;

static struct {
    uint64_t kept;
    int32_t path[MAX_N], length[2], end[2];
    uint8_t overridden[MAX_N];
} out;

static forest f;

static void set_parent(size_t i, int32_t parent) {
    f.parent[i] = parent;
    f.depth[i] = parent < 0 ? 0 : f.depth[parent] + 1;
    f.mask[i] = (uint64_t)1 << i | (parent < 0 ? 0 : f.mask[parent]);
}

/* logits 4, 3, 2 with probabilities of about 0.66, 0.24, 0.09; every token is the second, and pick is the first */
static void reset(size_t n) {
    memset(&f, 0, sizeof f);
    f.n = n;
    f.num_roots = 1;
    for (size_t i = 0; i < n; ++i) {
        set_parent(i, (int32_t)i - 1);
        f.token[i] = 2;
        f.row_pick[i] = 1;
        for (int k = 0; k < 3; ++k) {
            f.top_id[3 * i + (size_t)k] = k + 1;
            f.top_logit[3 * i + (size_t)k] = 4.0f - (float)k;
        }
        f.lse[i] = 4.41f;
        f.entropy[i] = 0.85f;
        f.token_logit[i] = 3.0f;
        f.pivot_prob[i] = 0.25f;
    }
}

static pad_rule rule_of(uint32_t kind, float t0, float t1) {
    pad_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.kind = kind;
    rule.threshold[0] = t0;
    rule.threshold[1] = t1;
    rule.log_floor = -INFINITY;
    return rule;
}

static pad_judged judged_of(void) {
    const pad_judged judged = {f.top_id, f.top_logit, f.lse, f.entropy, f.token_logit, f.pivot_prob};
    return judged;
}

static pad_status run(pad_rule rule) {
    const pad_judged judged = judged_of();
    return pad_relaxed_path(&rule, f.token, f.parent, f.row_pick, f.mask, f.depth, f.seq, &judged, f.n, f.num_roots,
                            f.history, &out.kept, out.path, out.length, out.end, out.overridden);
}

#endif
