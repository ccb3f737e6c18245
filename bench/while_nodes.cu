// What a conditional node of a CUDA graph costs: draft steps as a WHILE loop, behind IF nodes, unrolled with an early
// exit, against the same steps unrolled.
//
//     nvcc -std=c++17 -arch=sm_90a -O3 -o while_nodes bench/while_nodes.cu
//     ./while_nodes OUT.json [--spins 1000,5000] [--steps 20,5,150] [--grid 132] [--limit 18] [--conditional-pdl 1]
//
// Every graph is: begin, K steps of n kernels each, end. A kernel holds all its blocks for `spin` ns once its input is
// there. The last kernel of a step decides whether another follows: it compares the number of steps so far with `stop`,
// a number in device memory. Edges: "ordinary"; "pdl": programmatic within a step, whose first kernel has an ordinary
// edge, as in pad_engine; "pdl-all": that edge too (unrolled alone).
//
// The end kernel of every replay checks that exactly stop * n kernels ran, each behind the one before it: a kernel that
// finds another number of kernels before it than its own place counts as an error, and errors fail the run.
#include "graph_forms.cuh"

// ---- measuring ------------------------------------------------------------------------------------------------------

struct Row {
    Form form;
    Edges edges;
    int n, spin_ns, steps, stop;
    std::shared_ptr<Graph> graph;
    std::vector<double> us, host_us;
    int host_bound = 0;  // turns in which the host may not have kept ahead
    std::string error;

    double at(double share, const std::vector<double>& values) const {
        if (values.empty()) return NAN;
        auto sorted = values;
        std::sort(sorted.begin(), sorted.end());
        return sorted[std::min(sorted.size() - 1, size_t(share * sorted.size()))];
    }
    double median() const {
        if (us.empty() || !error.empty()) return NAN;
        auto sorted = us;
        std::sort(sorted.begin(), sorted.end());
        const size_t half = sorted.size() / 2;
        return sorted.size() % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
    }
};

struct Meter {
    cudaStream_t stream;
    cudaEvent_t start, end;
    State* state;
    double ghz = 1.9;

    Meter() {
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaEventCreate(&start));
        CHECK(cudaEventCreate(&end));
        CHECK(cudaMalloc(&state, sizeof(State)));
        CHECK(cudaMemset(state, 0, sizeof(State)));
        // loads the kernels, which a capture may not allow
        cudaFuncAttributes attributes;
        CHECK(cudaFuncGetAttributes(&attributes, begin_kernel));
        CHECK(cudaFuncGetAttributes(&attributes, step_kernel));
        CHECK(cudaFuncGetAttributes(&attributes, end_kernel));
        CHECK(cudaFuncGetAttributes(&attributes, gate_kernel));
        for (int turn = 0; turn < 4; turn++) {  // also wakes the card: 4 x ~60 ms
            const long long cycles = 100'000'000;
            CHECK(cudaEventRecord(start, stream));
            gate_kernel<<<132, 32, 0, stream>>>(cycles);
            CHECK(cudaEventRecord(end, stream));
            CHECK(cudaEventSynchronize(end));
            float ms;
            CHECK(cudaEventElapsedTime(&ms, start, end));
            ghz = cycles / (ms * 1e6);
        }
    }

    // REPLAYS in a row, queued behind a gate so that the host is ahead. keep: whether it counts
    void turn(Row& row, bool keep) {
        if (!row.error.empty()) return;
        const State before = {0, 0, row.stop, 0, 0};
        CHECK(cudaMemcpyAsync(state, &before, sizeof(State), cudaMemcpyHostToDevice, stream));
        const double expected = row.host_us.empty() ? 20.0 : row.host_us.back();
        const double gate_us = std::min(1.4 * expected * REPLAYS + 60.0, 4000.0);
        gate_kernel<<<1, 1, 0, stream>>>((long long)(gate_us * 1e3 * ghz));
        const auto clock = std::chrono::steady_clock::now();
        CHECK(cudaEventRecord(start, stream));
        for (int i = 0; i < REPLAYS; i++) {
            const cudaError_t refused = cudaGraphLaunch(row.graph->exec, stream);
            if (refused != cudaSuccess) {
                row.error = std::string("cudaGraphLaunch: ") + cudaGetErrorName(refused);
                cudaGetLastError();
                return;
            }
        }
        const double host = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - clock).count();
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, start, end));
        State after;
        CHECK(cudaMemcpy(&after, state, sizeof(State), cudaMemcpyDeviceToHost));
        if (after.errors || after.replays != REPLAYS) {
            row.error = "wrong: " + std::to_string(after.errors) + " errors, " + std::to_string(after.replays) +
                        " replays of " + std::to_string(REPLAYS);
            return;
        }
        row.host_us.push_back(host / REPLAYS);
        if (!keep) return;
        row.us.push_back(ms * 1e3 / REPLAYS);
        // ahead of the gate's end, or held back by a full queue and not by its own work
        row.host_bound += host > gate_us && host > 0.7 * (gate_us + ms * 1e3);
    }
};

// one group: all forms of one n and one spin, in turns
struct Group {
    int n, spin_ns;
    std::vector<Row> rows;
};

Group measure(Meter& meter, int n, int spin_ns, int grid, bool conditional_pdl) {
    Group group = {n, spin_ns, {}};
    const Work work = {meter.state, n, grid, (long long)(spin_ns * meter.ghz)};
    const bool large = n > 50, slow = spin_ns > 2000;
    // few where they are long
    std::vector<int> lengths = {1, 2, 3, 4, 5, 6, 7, 8};
    if (n > 10) lengths = {1, 2, 4, 8};
    if (large) lengths = slow ? std::vector<int>{1, 2} : std::vector<int>{1, 2, 4};
    const std::vector<int> stops = large ? std::vector<int>{1, 4} : std::vector<int>{1, 4, LONGEST};
    auto add = [&](Form form, Edges edges, int steps, const std::vector<int>& row_stops) {
        auto graph = std::make_shared<Graph>();
        graph->build(work, form, edges, steps);
        for (int stop : row_stops) group.rows.push_back({form, edges, n, spin_ns, steps, stop, graph, {}, {}, 0, graph->error});
    };
    for (Edges edges : {ORDINARY, PROGRAMMATIC}) {
        for (int length : lengths) add(UNROLLED, edges, length, {length});
        const bool conditional = edges == ORDINARY || conditional_pdl;
        if (conditional) add(WHILE, edges, 0, lengths);
        if (large && slow) continue;
        for (Form form : {IF_ROW, IF_NEST, PREDICATED})
            if (conditional || form == PREDICATED) add(form, edges, LONGEST, stops);
    }
    if (!large)
        for (int length : {1, 4}) add(UNROLLED, ALL, length, {length});
    for (int turn = -1; turn < TURNS; turn++)
        for (Row& row : group.rows) meter.turn(row, turn >= 0);
    return group;
}

// ---- what follows ---------------------------------------------------------------------------------------------------

const Row* find(const Group& group, Form form, Edges edges, int stop) {
    for (const Row& row : group.rows)
        if (row.form == form && row.edges == edges && row.stop == stop && row.error.empty()) return &row;
    return nullptr;
}

// microseconds of a replay; of `stop` steps
double us_of(const Group& group, Form form, Edges edges, int stop) {
    const Row* row = find(group, form, edges, stop);
    return row ? row->median() : NAN;
}

// least squares of us = a * x + b * y over points (x, y, us)
std::pair<double, double> solve(const std::vector<std::tuple<double, double, double>>& points) {
    double xx = 0, xy = 0, yy = 0, xz = 0, yz = 0;
    for (auto [x, y, z] : points) xx += x * x, xy += x * y, yy += y * y, xz += x * z, yz += y * z;
    const double det = xx * yy - xy * xy;
    if (points.size() < 2 || std::abs(det) < 1e-9) return {NAN, NAN};
    return {(xz * yy - yz * xy) / det, (yz * xx - xz * xy) / det};
}

// microseconds a step, and those of no step
std::pair<double, double> line(const Group& group, Form form, Edges edges) {
    std::vector<std::tuple<double, double, double>> points;
    for (int stop = 1; stop <= LONGEST; stop++)
        if (const double us = us_of(group, form, edges, stop); !std::isnan(us)) points.push_back({stop, 1, us});
    return solve(points);
}

struct Skips {
    Form form;
    Edges edges;
    double taken, skipped;           // see `skips`
    std::map<int, double> over;  // by the steps that run: microseconds over so many steps unrolled
};

// Of K = LONGEST steps, j run. Over j steps unrolled this costs
//   if-row:     (j - 1) taken + (K - j) skipped;  if-nest: (j - 1) taken + one skipped, if j < K
//   predicated: j taken + (K - j) skipped, where `taken` is what looking at the flag costs a step that runs
Skips skips(const Group& group, Form form, Edges edges) {
    Skips found = {form, edges, NAN, NAN, {}};
    std::vector<std::tuple<double, double, double>> points;
    for (int stop = 1; stop <= LONGEST; stop++) {
        const double over = us_of(group, form, edges, stop) - us_of(group, UNROLLED, edges, stop);
        if (std::isnan(over)) continue;
        found.over[stop] = over;
        points.push_back({form == PREDICATED ? stop : stop - 1, form == IF_NEST ? stop < LONGEST : LONGEST - stop, over});
    }
    std::tie(found.taken, found.skipped) = solve(points);
    return found;
}

std::string number(double value) {
    if (std::isnan(value)) return "null";
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", value);
    return text;
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out + "\"";
}

void print(const std::vector<Group>& groups) {
    std::printf("\nus a step, and what the WHILE node costs beyond the unrolled steps with the same edges\n");
    std::printf("%4s %5s %-9s | %8s %8s %8s | %8s %8s | %9s %9s\n", "n", "spin", "edges", "unrolled", "a kernel",
                "while", "fixed", "an iter.", "over,K=1", "over,K=4");
    for (const Group& group : groups)
        for (Edges edges : {ORDINARY, PROGRAMMATIC}) {
            const auto [flat, flat0] = line(group, UNROLLED, edges);
            const auto [loop, loop0] = line(group, WHILE, edges);
            auto over = [&](int k) { return us_of(group, WHILE, edges, k) - us_of(group, UNROLLED, edges, k); };
            std::printf("%4d %5d %-9s | %8.2f %8.3f %8.2f | %8.2f %8.2f | %9.2f %9.2f\n", group.n, group.spin_ns,
                        EDGES[edges], flat, flat / group.n, loop, loop0 - flat0, loop - flat, over(1), over(4));
        }
    std::printf("\nsteps skipped of K = %d, us: a step that runs / a skipped step (if-nest: one stop); over j steps unrolled\n",
                LONGEST);
    std::printf("%4s %5s %-9s %-10s | %8s %8s | %8s %8s %8s\n", "n", "spin", "edges", "form", "runs", "skipped", "j=1",
                "j=4", "j=8");
    for (const Group& group : groups)
        for (Edges edges : {ORDINARY, PROGRAMMATIC})
            for (Form form : {IF_ROW, IF_NEST, PREDICATED}) {
                auto found = skips(group, form, edges);
                if (found.over.empty()) continue;
                auto over = [&](int j) { return found.over.count(j) ? found.over[j] : NAN; };
                std::printf("%4d %5d %-9s %-10s | %8.2f %8.2f | %8.2f %8.2f %8.2f\n", group.n, group.spin_ns,
                            EDGES[edges], FORMS[form], found.taken, found.skipped, over(1), over(4), over(8));
            }
    std::printf("\nunrolled, 4 steps, us: ordinary / pdl / pdl-all\n");
    for (const Group& group : groups)
        std::printf("%4d %5d | %8.2f %8.2f %8.2f\n", group.n, group.spin_ns, us_of(group, UNROLLED, ORDINARY, 4),
                    us_of(group, UNROLLED, PROGRAMMATIC, 4), us_of(group, UNROLLED, ALL, 4));
    std::printf("\nhost, us a launch (4 steps run): unrolled / while / if-row / if-nest / predicated; and ms to instantiate\n");
    for (const Group& group : groups)
        for (Edges edges : {ORDINARY, PROGRAMMATIC}) {
            std::printf("%4d %5d %-9s |", group.n, group.spin_ns, EDGES[edges]);
            for (Form form : {UNROLLED, WHILE, IF_ROW, IF_NEST, PREDICATED})
                if (const Row* row = find(group, form, edges, 4))
                    std::printf(" %6.1f (%.1f)", row->at(0.5, row->host_us), row->graph->instantiate_ms);
                else
                    std::printf(" %6s (-)", "-");
            std::printf("\n");
        }
    std::printf("\nprogrammatic edges held by the graphs (of all edges), n = %d\n", groups[0].n);
    for (Form form : {UNROLLED, WHILE, IF_ROW, IF_NEST, PREDICATED})
        for (const Row& row : groups[0].rows)
            if (row.form == form && row.edges == PROGRAMMATIC && row.stop == 4)
                std::printf("  %-10s %zu of %zu%s\n", FORMS[form], row.graph->programmatic, row.graph->edges,
                            row.error.empty() ? "" : "  (refused, see below)");
    int refused = 0, bound = 0;
    for (const Group& group : groups)
        for (const Row& row : group.rows) {
            bound += row.host_bound > TURNS / 2;
            if (row.error.empty()) continue;
            if (!refused++) std::printf("\nREFUSED OR WRONG\n");
            std::printf("  %s %s n=%d spin=%d K=%d stop=%d: %s\n", FORMS[row.form], EDGES[row.edges], row.n, row.spin_ns,
                        row.steps, row.stop, row.error.c_str());
        }
    std::printf("\n%d rows refused or wrong, %d rows in which the host may have been the limit\n", refused, bound);
}

void write(const char* path, const std::vector<Group>& groups, const std::string& environment) {
    const std::string part = std::string(path) + ".part";
    FILE* out = std::fopen(part.c_str(), "w");
    if (!out) throw std::runtime_error("cannot write " + part);
    std::fprintf(out, "{\n \"environment\": %s,\n \"what\": \"us a replay: medians of %d turns of %d replays in a row; "
                      "steps 0: a loop\",\n \"while\": [", environment.c_str(), TURNS, REPLAYS);
    const char* comma = "";
    for (const Group& group : groups)
        for (Edges edges : {ORDINARY, PROGRAMMATIC}) {
            const auto [flat, flat0] = line(group, UNROLLED, edges);
            const auto [loop, loop0] = line(group, WHILE, edges);
            std::fprintf(out, "%s\n  {\"n\": %d, \"spin_ns\": %d, \"edges\": \"%s\", \"unrolled_step_us\": %s, "
                              "\"while_step_us\": %s, \"fixed_us\": %s, \"iteration_us\": %s}", comma, group.n,
                         group.spin_ns, EDGES[edges], number(flat).c_str(), number(loop).c_str(),
                         number(loop0 - flat0).c_str(), number(loop - flat).c_str());
            comma = ",";
        }
    std::fprintf(out, "\n ],\n \"skips\": [");
    comma = "";
    for (const Group& group : groups)
        for (Edges edges : {ORDINARY, PROGRAMMATIC})
            for (Form form : {IF_ROW, IF_NEST, PREDICATED}) {
                const auto found = skips(group, form, edges);
                if (found.over.empty()) continue;
                std::fprintf(out, "%s\n  {\"n\": %d, \"spin_ns\": %d, \"edges\": \"%s\", \"form\": \"%s\", "
                                  "\"taken_us\": %s, \"skipped_us\": %s}", comma, group.n, group.spin_ns, EDGES[edges],
                             FORMS[form], number(found.taken).c_str(), number(found.skipped).c_str());
                comma = ",";
            }
    std::fprintf(out, "\n ],\n \"rows\": [");
    comma = "";
    for (const Group& group : groups)
        for (const Row& row : group.rows) {
            std::fprintf(out, "%s\n  {\"form\": \"%s\", \"edges\": \"%s\", \"n\": %d, \"spin_ns\": %d, \"steps\": %d, "
                              "\"stop\": %d, \"us\": %s, \"p20\": %s, \"p80\": %s, \"replays\": %zu, \"host_us\": %s, "
                              "\"host_bound_turns\": %d, \"instantiate_ms\": %s, \"edges_held\": %zu, "
                              "\"programmatic_edges\": %zu, \"error\": %s}", comma, FORMS[row.form], EDGES[row.edges],
                         row.n, row.spin_ns, row.steps, row.stop, number(row.median()).c_str(),
                         number(row.at(0.2, row.us)).c_str(), number(row.at(0.8, row.us)).c_str(),
                         row.us.size() * REPLAYS, number(row.at(0.5, row.host_us)).c_str(), row.host_bound,
                         number(row.graph->instantiate_ms).c_str(), row.graph->edges, row.graph->programmatic,
                         row.error.empty() ? "null" : quoted(row.error).c_str());
            comma = ",";
        }
    std::fprintf(out, "\n ]\n}\n");
    const bool failed = std::ferror(out);
    if (std::fclose(out) || failed || std::rename(part.c_str(), path)) throw std::runtime_error("cannot write " + part);
}

std::vector<int> list_of(const char* text) {
    std::vector<int> values;
    for (const char* rest = text; *rest;) {
        char* end;
        values.push_back(std::strtol(rest, &end, 10));
        if (end == rest || values.back() < 1 || (*end && *end != ',')) throw std::runtime_error(std::string("not a list: ") + text);
        rest = end + (*end == ',');
    }
    return values;
}

int main(int argc, char** argv) try {
    if (argc < 2 || argc % 2) {
        std::fprintf(stderr, "usage: %s OUT.json [--spins NS,..] [--steps N,..] [--grid BLOCKS] [--limit SECONDS] "
                             "[--conditional-pdl 0|1]\n", argv[0]);
        return 2;
    }
    std::vector<int> spins = {1000, 5000}, sizes = {20, 5, 150};
    int grid = 132;
    double limit = 18;
    bool conditional_pdl = true;  // programmatic edges in bodies of conditional nodes
    for (int i = 2; i + 1 < argc; i += 2) {
        const std::string key = argv[i];
        if (key == "--spins") spins = list_of(argv[i + 1]);
        else if (key == "--steps") sizes = list_of(argv[i + 1]);
        else if (key == "--grid") grid = std::atoi(argv[i + 1]);
        else if (key == "--limit") limit = std::atof(argv[i + 1]);
        else if (key == "--conditional-pdl") conditional_pdl = std::atoi(argv[i + 1]);
        else throw std::runtime_error("no such option: " + key);
    }
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    const auto clock = std::chrono::steady_clock::now();
    auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - clock).count(); };
    cudaDeviceProp card;
    int driver, runtime;
    CHECK(cudaGetDeviceProperties(&card, 0));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));
    Meter meter;
    std::printf("%s, driver's CUDA %d, runtime %d, %.3f GHz, %d blocks of %d threads\n", card.name, driver, runtime,
                meter.ghz, grid, THREADS);
    std::vector<Group> groups;
    bool failed = false;
    for (int spin_ns : spins)
        for (int n : sizes) {
            if (failed) break;
            if (seconds() > 0.75 * limit) {
                std::printf("left out for want of time: n = %d, spin %d ns\n", n, spin_ns);
                continue;
            }
            try {
                groups.push_back(measure(meter, n, spin_ns, grid, conditional_pdl));
            } catch (const std::runtime_error& error) {  // of the device: nothing can follow in this process
                std::printf("n = %d, spin %d ns FAILED ON THE DEVICE: %s\n", n, spin_ns, error.what());
                failed = true;
            }
            if (failed) break;
            std::printf("n = %d, spin %d ns: measured, %.1f s so far\n", n, spin_ns, seconds());
            std::fflush(stdout);
        }
    char environment[512];
    std::snprintf(environment, sizeof environment, "{\"card\": \"%s\", \"driver_cuda\": %d, \"runtime\": %d, \"ghz\": "
                  "%.3f, \"grid\": %d, \"threads\": %d, \"seconds\": %.1f}", card.name, driver, runtime, meter.ghz, grid,
                  THREADS, seconds());
    if (groups.empty()) {
        std::fprintf(stderr, "nothing was measured\n");
        return 3;
    }
    write(argv[1], groups, environment);
    print(groups);
    for (const Group& group : groups)
        for (const Row& row : group.rows)
            if (row.error.rfind("wrong", 0) == 0) return 1;
    return failed ? 3 : 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
