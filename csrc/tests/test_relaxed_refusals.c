/* Which rules, forests and pointers pad_relaxed_path refuses. */
#include "check.h"
#include "relaxed_forest.h"

static void test_refused_rules(void) {
    pad_rule rule = rule_of(9, 0, 0);
    reset(2);
    CHECK(run(rule) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "kind") != NULL);
    CHECK(run(rule_of(PAD_RULE_TYPICAL, 0, NAN)) == PAD_ERROR_ARGUMENT);
    CHECK(run(rule_of(PAD_RULE_PIVOT, 1, NAN)) == PAD_OK);
    const float bad_k[] = {0.0f, 1.5f, 4.0f, -1.0f, INFINITY};
    for (size_t i = 0; i < sizeof bad_k / sizeof *bad_k; ++i)
        CHECK(run(rule_of(PAD_RULE_TOPK, bad_k[i], 0)) == PAD_ERROR_ARGUMENT);
    rule = rule_of(PAD_RULE_BASE, NAN, NAN);
    CHECK(run(rule) == PAD_OK);
    rule.log_floor = NAN;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "log_floor") != NULL);
    rule.log_floor = -INFINITY;
    rule.outer_floor = 2;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT);
    rule.outer_floor = 0;
    rule.window = 65;
    CHECK(run(rule) == PAD_OK);
    rule.max_overrides = 1;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT);
    rule.window = 0;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "window") != NULL);
}

static void test_refused_forests(void) {
    const pad_rule rule = rule_of(PAD_RULE_BASE, 0, 0);
    reset(2);
    f.n = 65;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "at most 64") != NULL);
    reset(2);
    f.parent[1] = 1;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT);
    reset(2);
    f.num_roots = 2;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT);
    reset(2);
    f.seq[1] = 4;
    CHECK(run(rule) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "row 1 fits no path") != NULL);
}

static void test_null_pointers(void) {
    const pad_rule rule = rule_of(PAD_RULE_PIVOT, 1, 0), base = rule_of(PAD_RULE_BASE, 0, 0);
    reset(2);
    for (int missing = 0; missing < 6; ++missing) {
        pad_judged judged = judged_of();
        if (missing == 0)
            judged.top_id = NULL;
        const float **pointers[5] = {&judged.top_logit, &judged.lse, &judged.entropy, &judged.token_logit,
                                     &judged.pivot_prob};
        if (missing > 0)
            *pointers[missing - 1] = NULL;
        CHECK(pad_relaxed_path(&rule, f.token, f.parent, f.row_pick, f.mask, f.depth, f.seq, &judged, 2, 1, NULL,
                               &out.kept, out.path, out.length, out.end, out.overridden) == PAD_ERROR_ARGUMENT);
        CHECK(pad_relaxed_path(&base, f.token, f.parent, f.row_pick, f.mask, f.depth, f.seq, &judged, 2, 1, NULL,
                               &out.kept, out.path, out.length, out.end,
                               out.overridden) == (missing == 5 ? PAD_OK : PAD_ERROR_ARGUMENT));
    }
    const pad_judged judged = judged_of();
    for (int missing = 0; missing < 13; ++missing)
        CHECK(pad_relaxed_path(
                  missing == 0 ? NULL : &base, missing == 1 ? NULL : f.token, missing == 2 ? NULL : f.parent,
                  missing == 3 ? NULL : f.row_pick, missing == 4 ? NULL : f.mask, missing == 5 ? NULL : f.depth,
                  missing == 6 ? NULL : f.seq, missing == 7 ? NULL : &judged, 2, 1, NULL,
                  missing == 8 ? NULL : &out.kept, missing == 9 ? NULL : out.path, missing == 10 ? NULL : out.length,
                  missing == 11 ? NULL : out.end, missing == 12 ? NULL : out.overridden) == PAD_ERROR_ARGUMENT);
    CHECK(pad_relaxed_path(&base, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL) ==
          PAD_OK);
}

int main(void) {
    test_refused_rules();
    test_refused_forests();
    test_null_pointers();
    return failures != 0;
}
