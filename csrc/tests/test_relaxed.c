/* The relaxed path: each kind at its threshold, scores, floors and cuts on small forests. That random forests
 * agree with torch is tests/test_native_tail.py. */
#include "check.h"
#include "relaxed_forest.h"

/* how many nodes of a chain stay behind the root */
static int passed(pad_rule rule) {
    CHECK(run(rule) == PAD_OK);
    for (int32_t i = 0; i < out.length[0]; ++i)
        CHECK(out.path[i] == i);
    CHECK(out.end[0] == f.row_pick[out.length[0] - 1]);
    return out.length[0] - 1;
}

static void test_kinds(void) {
    reset(3);
    CHECK(passed(rule_of(PAD_RULE_BASE, 0, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_PAPER, 0.75f, 0)) == 0); /* 3 > 3 is false */
    CHECK(passed(rule_of(PAD_RULE_MARGIN_PAPER, 0.74f, 0)) == 2);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_RATIO, -1.0f, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_RATIO, -1.01f, 0)) == 2);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_GAP, 0.4f, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_GAP, 0.43f, 0)) == 2);
    CHECK(passed(rule_of(PAD_RULE_PIVOT, 0.24f, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_PIVOT, 0.25f, 0)) == 2); /* not strict */
    CHECK(passed(rule_of(PAD_RULE_TYPICAL, -1.4f, INFINITY)) == 0);
    CHECK(passed(rule_of(PAD_RULE_TYPICAL, -1.42f, INFINITY)) == 2);
    CHECK(passed(rule_of(PAD_RULE_TYPICAL, 0.0f, -0.57f)) == 2);
    CHECK(passed(rule_of(PAD_RULE_TOPK, 1, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_TOPK, 2, 0)) == 2);
    CHECK(passed(rule_of(PAD_RULE_FLY_PAPER, 0.86f, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_FLY_PAPER, 0.85f, 0)) == 2);
    /* 0.664 * 0.41 + 0.244 * 1.41 + 0.090 * 2.41 = 0.833 */
    CHECK(passed(rule_of(PAD_RULE_FLY_RELEASED, 0.84f, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_FLY_RELEASED, 0.83f, 0)) == 2);
    f.token[1] = f.token[2] = 3;
    CHECK(passed(rule_of(PAD_RULE_MARGIN_RATIO, -9.0f, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_TOPK, 2, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_TOPK, 3, 0)) == 2);
    f.row_pick[0] = -1;
    CHECK(passed(rule_of(PAD_RULE_TOPK, 3, 0)) == 0 && out.end[0] == -1);
}

/* where nothing may pass, nothing does, whatever the numbers; where ids are compared, a NaN passes nothing */
static void test_exact_limits(void) {
    reset(2);
    f.pivot_prob[1] = 0.0f;
    f.top_logit[4] = 4.0f; /* a tie of first and second */
    CHECK(passed(rule_of(PAD_RULE_PIVOT, 0, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_PAPER, 1, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_RATIO, 0, 0)) == 0);
    CHECK(passed(rule_of(PAD_RULE_MARGIN_GAP, 0, 0)) == 0);
    f.top_logit[3] = f.top_logit[4] = -1.0f; /* the paper's form asks for a positive logit */
    CHECK(passed(rule_of(PAD_RULE_MARGIN_PAPER, 0.5f, 0)) == 0);
    f.lse[1] = f.entropy[1] = f.token_logit[1] = f.pivot_prob[1] = NAN;
    for (uint32_t kind = 0; kind <= PAD_RULE_FLY_RELEASED; ++kind)
        if (kind != PAD_RULE_TOPK && kind != PAD_RULE_MARGIN_RATIO)
            CHECK(passed(rule_of(kind, kind == PAD_RULE_MARGIN_PAPER ? 0.5f : 1e-3f, 0)) == 0);
}

static void test_floor(void) {
    pad_rule rule = rule_of(PAD_RULE_TOPK, 2, 0);
    reset(2);
    rule.log_floor = 3.0f - 4.41f;
    CHECK(passed(rule) == 1);
    rule.log_floor += 1e-3f;
    CHECK(passed(rule) == 0);
    f.row_pick[0] = 2;
    CHECK(passed(rule) == 1 && out.overridden[1] == 0);
    rule.outer_floor = 1;
    CHECK(passed(rule) == 0);
}

/* a star of five: the base wins, then the score, then the lowest row */
static void test_scores(void) {
    const float logit[5] = {0, 1.0f, 3.0f, 3.0f, NAN};
    reset(5);
    for (size_t i = 1; i < 5; ++i) {
        set_parent(i, 0);
        f.token_logit[i] = logit[i];
        f.pivot_prob[i] = 0.25f * (float)(4 - i);
    }
    CHECK(run(rule_of(PAD_RULE_FLY_PAPER, 0, 0)) == PAD_OK);
    CHECK(out.kept == 5 && out.length[0] == 2 && out.path[1] == 2 && out.overridden[2] == 1 && out.overridden[3] == 0);
    CHECK(run(rule_of(PAD_RULE_PIVOT, 1, 0)) == PAD_OK &&
          out.kept == 9); /* row 4 has no floor to pass: its ln p is NaN */
    f.token_logit[4] = -9.0f;
    CHECK(run(rule_of(PAD_RULE_PIVOT, 1, 0)) == PAD_OK && out.kept == 17);
    f.token[1] = 1;
    CHECK(run(rule_of(PAD_RULE_PIVOT, 1, 0)) == PAD_OK && out.kept == 3 && out.overridden[1] == 0);
}

static void test_lookahead(void) {
    pad_rule rule = rule_of(PAD_RULE_TOPK, 2, 0);
    reset(6);
    for (size_t i = 1; i < 6; ++i)
        f.token[i] = i == 2 ? 2 : 1; /* base, override, base, base, base */
    for (uint32_t lookahead = 0; lookahead < 8; ++lookahead) {
        rule.lookahead = lookahead;
        CHECK(passed(rule) == (lookahead <= 3 ? 5 : 1));
        CHECK(out.overridden[2] == (lookahead <= 3) && out.kept == 63);
    }
    f.token[4] = 2;
    rule.lookahead = 1; /* each override has one base behind it */
    CHECK(passed(rule) == 5);
    rule.lookahead = 2;
    CHECK(passed(rule) == 1);
    rule.lookahead = UINT32_MAX;
    CHECK(passed(rule) == 1);
    reset(64);
    rule.lookahead = 0;
    CHECK(passed(rule) == 63);
    rule.lookahead = 1;
    CHECK(passed(rule) == 0);
}

static void test_reach(void) {
    pad_rule rule = rule_of(PAD_RULE_TOPK, 2, 0);
    reset(6);
    rule.reach = 2; /* depths 1 to 3 of 5 */
    CHECK(passed(rule) == 3);
    /* the subtree counts, not the path: rows 4 and 5 hang on row 1 as another branch */
    set_parent(4, 1);
    set_parent(5, 4);
    f.token[4] = 9;
    CHECK(run(rule) == PAD_OK && out.length[0] == 2);
    rule.reach = 1;
    CHECK(run(rule) == PAD_OK && out.length[0] == 3);
    rule.reach = UINT32_MAX;
    CHECK(run(rule) == PAD_OK && out.length[0] == 1);
}

static void test_budget(void) {
    pad_rule rule = rule_of(PAD_RULE_TOPK, 2, 0);
    reset(6);
    rule.max_overrides = 2;
    rule.window = 64;
    CHECK(passed(rule) == 2);
    f.history[0] = 1;
    CHECK(passed(rule) == 1);
    rule.window = 1;
    CHECK(passed(rule) == 5);
    rule.window = 2;
    rule.max_overrides = 1;
    f.history[0] = 2; /* the last but one: out of the window */
    CHECK(passed(rule) == 1);
    f.token[2] = 1;
    CHECK(passed(rule) == 3);
    f.history[0] = (uint64_t)1 << 63;
    rule.window = 64; /* pushed out by the first token */
    CHECK(passed(rule) == 2);
}

static void test_two_sequences(void) {
    pad_rule rule = rule_of(PAD_RULE_TOPK, 2, 0);
    reset(6);
    for (size_t i = 3; i < 6; ++i) {
        set_parent(i, i == 3 ? -1 : (int32_t)i - 1);
        f.seq[i] = 8;
    }
    f.num_roots = 2;
    f.row_pick[0] = 7;
    rule.max_overrides = 1;
    rule.window = 64;
    f.history[0] = 1;
    CHECK(run(rule) == PAD_OK);
    CHECK(out.length[0] == 1 && out.length[1] == 2 && out.path[1] == 3 && out.path[2] == 4);
    CHECK(out.end[0] == 7 && out.end[1] == 1 && out.overridden[4] == 1 && out.overridden[1] == 0 && out.kept == 63);
}

static void test_history(void) {
    CHECK(pad_override_history(5, 2, 1) == 21);
    CHECK(pad_override_history(5, 0, 7) == 5);
    CHECK(pad_override_history(UINT64_MAX, 64, 6) == 6 && pad_override_history(UINT64_MAX, 1000, 6) == 6);
    CHECK(pad_override_history(1, 63, 0) == (uint64_t)1 << 63);
    CHECK(pad_override_history(0, 2, UINT64_MAX) == 3);
}

int main(void) {
    test_kinds();
    test_exact_limits();
    test_floor();
    test_scores();
    test_lookahead();
    test_reach();
    test_budget();
    test_two_sequences();
    test_history();
    return failures != 0;
}
