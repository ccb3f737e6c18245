/* libpad inside a program of another runtime: a whole round of speculative decoding, again and again, in plain C.
 *
 * The target here is a function that makes up logits; in its place goes whatever runs the model. Build it against
 * csrc/include/pad.h and libpad.so, or as CI does: cmake -DPAD_TESTS=ON, then ctest -R embed.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "pad.h"

enum { VOCAB = 97, DRAFTED = 4, ROWS = DRAFTED + 1, NUM_TOKENS = 40, CAPACITY = NUM_TOKENS + ROWS, SCRATCH = ROWS };

/* logits of the token after `token`: two candidates that are close on some tokens, and a floor of noise */
static void target(int32_t token, float *logits) {
    for (int32_t t = 0; t < VOCAB; ++t)
        logits[t] = (float)((t * 31 + token * 17) % 23) / 23.0f;
    logits[(token * 5 + 3) % VOCAB] = 6.0f;
    logits[(token * 7 + 1) % VOCAB] = token % 3 ? 2.0f : 5.7f;
}

/* a drafter that errs: on every third token it takes the target's second choice */
static int32_t draft(int32_t token) { return token % 3 ? (token * 5 + 3) % VOCAB : (token * 7 + 1) % VOCAB; }

/* a chain of drafted tokens behind the last committed one, as a forest of one sequence */
typedef struct {
    int32_t token[ROWS], parent[ROWS], depth[ROWS], seq[ROWS];
    uint64_t mask[ROWS];
} chain;

static chain draft_chain(int32_t root) {
    chain c;
    for (int32_t i = 0; i < ROWS; ++i) {
        c.token[i] = i ? draft(c.token[i - 1]) : root;
        c.parent[i] = i - 1;
        c.depth[i] = i;
        c.seq[i] = 0;
        c.mask[i] = ((uint64_t)2 << i) - 1; /* itself and all before it */
    }
    return c;
}

/* what the rule decides from: the statistics of the target's rows, handed to the nodes that they judge */
typedef struct {
    int32_t top_id[3 * ROWS];
    float top_logit[3 * ROWS], lse[ROWS], entropy[ROWS], token_logit[ROWS];
} numbers;

static pad_status judge(const chain *c, const float *logits, numbers *out) {
    numbers rows;
    float margin[ROWS];
    const pad_status status =
        pad_row_stats(logits, ROWS, VOCAB, VOCAB, rows.top_id, rows.top_logit, rows.lse, rows.entropy, margin);
    if (status)
        return status;
    return pad_gather_judged(rows.top_id, rows.top_logit, rows.lse, rows.entropy, logits, VOCAB, VOCAB, c->token,
                             c->parent, ROWS, out->top_id, out->top_logit, out->lse, out->entropy, out->token_logit);
}

typedef struct {
    int32_t path[ROWS], length, end_token;
    uint8_t overridden[ROWS];
} verdict;

/* one verification pass and its judgement; position: that of the token after the root */
static pad_status verify(const chain *c, const pad_rule *rule, uint32_t position, uint64_t history, verdict *out) {
    float logits[ROWS * VOCAB];
    uint32_t positions[ROWS];
    int32_t row_pick[ROWS];
    numbers node;
    uint64_t kept;
    for (uint32_t i = 0; i < ROWS; ++i) {
        target(c->token[i], logits + i * VOCAB);
        positions[i] = position + i;
    }
    /* temperature 0: the plain argmax; above it the same call draws */
    pad_status status = pad_gumbel_pick(logits, ROWS, VOCAB, VOCAB, positions, 1, 0.0f, row_pick);
    if (!status)
        status = judge(c, logits, &node);
    if (status)
        return status;
    const pad_judged judged = {node.top_id, node.top_logit, node.lse, node.entropy, node.token_logit, NULL};
    return pad_relaxed_path(rule, c->token, c->parent, row_pick, c->mask, c->depth, c->seq, &judged, ROWS, 1, &history,
                            &kept, out->path, &out->length, &out->end_token, out->overridden);
}

/* A key/value buffer of one number a slot stands for the model's: its rows were written to scratch, the kept ones move.
 */
static pad_status commit(int32_t *cache, const chain *c, const verdict *v, size_t length) {
    int32_t source[ROWS], to[ROWS];
    for (int32_t i = 0; i < ROWS; ++i)
        cache[SCRATCH - 1 - i] = c->token[i];
    const pad_status status = pad_commit_list(v->path, (size_t)v->length, length, SCRATCH, CAPACITY, source, to);
    for (int32_t i = 0; !status && i < v->length; ++i)
        cache[to[i]] = cache[source[i]];
    return status;
}

/* Decodes NUM_TOKENS tokens or a few more, prints them, and counts the rounds and overrides; 0 if all went well. */
static int decode(const pad_rule *rule, int32_t *tokens, int *rounds, int *overrides) {
    int32_t cache[SCRATCH + CAPACITY];
    uint64_t history = 0;
    size_t length = 0; /* committed rows; tokens[length] is the root */
    tokens[0] = 1;
    for (*rounds = *overrides = 0; length < NUM_TOKENS; ++*rounds) {
        const chain c = draft_chain(tokens[length]);
        verdict v;
        uint64_t bits = 0;
        pad_status status = verify(&c, rule, (uint32_t)length + 1, history, &v);
        if (!status)
            status = commit(cache, &c, &v, length);
        if (status) {
            fprintf(stderr, "%s\n", pad_last_error());
            return 1;
        }
        for (int32_t i = 1; i < v.length; ++i) {
            tokens[length + (size_t)i] = c.token[v.path[i]];
            printf("%d%s ", (int)c.token[v.path[i]], v.overridden[v.path[i]] ? "*" : "");
            *overrides += v.overridden[v.path[i]];
            bits = bits << 1 | v.overridden[v.path[i]];
        }
        printf("%d | ", (int)v.end_token);
        history = pad_override_history(history, (size_t)v.length, bits << 1);
        length += (size_t)v.length;
        tokens[length] = v.end_token;
    }
    printf("\n");
    /* the buffer holds what was committed, in its order */
    return memcmp(cache + SCRATCH, tokens, length * sizeof *tokens) != 0;
}

int main(void) {
    pad_rule rule;
    int32_t exact[CAPACITY + 1], relaxed[CAPACITY + 1];
    int rounds[2], overrides[2];
    memset(&rule, 0, sizeof rule);
    rule.kind = PAD_RULE_BASE;
    rule.log_floor = -INFINITY;
    printf("libpad %s, exact:   ", pad_version());
    if (decode(&rule, exact, &rounds[0], &overrides[0]))
        return 1;
    rule.kind = PAD_RULE_MARGIN_PAPER;
    rule.threshold[0] = 0.9f;
    rule.max_overrides = 4; /* of any 16 tokens */
    rule.window = 16;
    printf("libpad %s, relaxed: ", pad_version());
    if (decode(&rule, relaxed, &rounds[1], &overrides[1]))
        return 1;
    printf("%d rounds exact, %d with %d overrides (*)\n", rounds[0], rounds[1], overrides[1]);
    /* the exact rule gives the target's own tokens */
    for (int i = 0; i < NUM_TOKENS; ++i)
        if (exact[i + 1] != (exact[i] * 5 + 3) % VOCAB)
            return 1;
    return overrides[0] != 0 || overrides[1] == 0 || rounds[1] >= rounds[0];
}
