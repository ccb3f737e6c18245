// Draft steps as CUDA graphs: unrolled, unrolled with an early exit, as a WHILE loop, and behind IF nodes, in a row or
// nested. What they are for, and what a step is: while_nodes.cu.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

constexpr int THREADS = 128, REPLAYS = 20, TURNS = 10, LONGEST = 8;  // replays in a row; turns of all forms
enum Flags { PDL = 1, DECIDES = 2, SETS = 4, LEAVES = 8 };
enum Form { UNROLLED, WHILE, IF_ROW, IF_NEST, PREDICATED };
enum Edges { ORDINARY, PROGRAMMATIC, ALL };
const char* const FORMS[] = {"unrolled", "while", "if-row", "if-nest", "predicated"};
const char* const EDGES[] = {"ordinary", "pdl", "pdl-all"};

struct State {
    int kernels, steps;  // of the replay at work
    int stop;            // steps to be run
    int replays, errors;
};

// ---- device ---------------------------------------------------------------------------------------------------------

__device__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

__global__ void begin_kernel(volatile State* state) { state->kernels = 0, state->steps = 0; }

__global__ void step_kernel(volatile State* state, int place, int n, long long cycles, int flags,
                            cudaGraphConditionalHandle handle) {
    if (flags & PDL) {
        cudaTriggerProgrammaticLaunchCompletion();
        cudaGridDependencySynchronize();
    }
    // volatile loads come from L2, so nothing stale is seen
    if ((flags & LEAVES) && state->steps >= state->stop) return;
    spin(cycles);
    if (blockIdx.x || threadIdx.x) return;
    const int kernels = state->kernels;
    if (kernels != state->steps * n + place) state->errors = state->errors + 1;
    state->kernels = kernels + 1;
    if (flags & DECIDES) {
        const int steps = state->steps + 1;
        state->steps = steps;
        // the second bound ends a loop whose counter is broken
        if (flags & SETS) cudaGraphSetConditional(handle, steps < state->stop && steps < 64);
    }
}

__global__ void end_kernel(volatile State* state, int n) {
    const int stop = state->stop;
    if (state->steps != stop || state->kernels != stop * n) state->errors = state->errors + 1;
    state->replays = state->replays + 1;
}

__global__ void gate_kernel(long long cycles) { spin(cycles); }

// ---- building graphs ------------------------------------------------------------------------------------------------

void check(cudaError_t error, const char* call) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(error));
}
#define CHECK(call) check(call, #call)

struct Work {
    State* state;
    int n, grid;
    long long cycles;
};

// the n kernels of a step; the last one sets `handle` if `sets`
void launch_step(cudaStream_t stream, const Work& work, Edges edges, bool sets, cudaGraphConditionalHandle handle,
                 bool leaves = false) {
    for (int i = 0; i < work.n; i++) {
        const bool last = i == work.n - 1;
        int flags = (edges != ORDINARY ? PDL : 0) | (last ? DECIDES : 0) | (last && sets ? SETS : 0);
        flags |= leaves ? LEAVES : 0;
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(work.grid), config.blockDim = dim3(THREADS), config.stream = stream;
        config.attrs = &attribute, config.numAttrs = edges == ALL || (edges == PROGRAMMATIC && i > 0);
        CHECK(cudaLaunchKernelEx(&config, step_kernel, (volatile State*)work.state, i, work.n, work.cycles, flags,
                                 handle));
    }
}

struct Graph {
    cudaGraph_t root = nullptr;
    cudaGraphExec_t exec = nullptr;
    std::vector<cudaGraph_t> parts;  // root and bodies
    std::vector<cudaStream_t> streams;
    std::string error;
    size_t edges = 0, programmatic = 0;
    double instantiate_ms = 0;

    ~Graph() {
        if (exec) cudaGraphExecDestroy(exec);
        if (root) cudaGraphDestroy(root);
        for (auto stream : streams) cudaStreamDestroy(stream);
    }

    cudaStream_t begin_capture(cudaGraph_t graph) {
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        streams.push_back(stream);
        // as pad_engine captures
        CHECK(cudaStreamBeginCaptureToGraph(stream, graph, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal));
        parts.push_back(graph);
        return stream;
    }

    static void end_capture(cudaStream_t stream) {
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(stream, &graph));
    }

    // the graph that a stream is capturing into, and what its next node depends on
    struct Capture {
        cudaGraph_t graph;
        const cudaGraphNode_t* nodes;
        const cudaGraphEdgeData* edges;
        size_t count;
    };
    static Capture capture_of(cudaStream_t stream) {
        Capture found = {};
        cudaStreamCaptureStatus status;
        CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &found.graph, &found.nodes, &found.edges,
                                       &found.count));
        if (status != cudaStreamCaptureStatusActive) throw std::runtime_error("the stream does not capture");
        return found;
    }

    static cudaGraphConditionalHandle handle_for(cudaStream_t stream, unsigned value) {
        cudaGraphConditionalHandle handle;
        CHECK(cudaGraphConditionalHandleCreate(&handle, capture_of(stream).graph, value, cudaGraphCondAssignDefault));
        return handle;
    }

    // puts a conditional node behind what the stream has captured; returns the graph of its body
    static cudaGraph_t add_conditional(cudaStream_t stream, cudaGraphConditionalHandle handle,
                                       cudaGraphConditionalNodeType type) {
        const Capture at = capture_of(stream);
        cudaGraphNodeParams params = {};
        params.type = cudaGraphNodeTypeConditional;
        params.conditional.handle = handle, params.conditional.type = type, params.conditional.size = 1;
        cudaGraphNode_t node;
        CHECK(cudaGraphAddNode(&node, at.graph, at.nodes, at.edges, at.count, &params));
        CHECK(cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1, cudaStreamSetCaptureDependencies));
        return params.conditional.phGraph_out[0];
    }

    void add_steps(cudaStream_t stream, const Work& work, Form form, Edges edges, int steps) {
        if (form == UNROLLED || form == PREDICATED) {
            for (int k = 0; k < steps; k++) launch_step(stream, work, edges, false, {}, form == PREDICATED);
        } else if (form == WHILE) {
            const auto handle = handle_for(stream, 1);
            const auto body = begin_capture(add_conditional(stream, handle, cudaGraphCondTypeWhile));
            launch_step(body, work, edges, true, handle);
            end_capture(body);
        } else if (form == IF_NEST) {
            // a step, and in an IF node behind it the steps after it
            const auto handle = steps > 1 ? handle_for(stream, 0) : cudaGraphConditionalHandle{};
            launch_step(stream, work, edges, steps > 1, handle);
            if (steps == 1) return;
            const auto body = begin_capture(add_conditional(stream, handle, cudaGraphCondTypeIf));
            add_steps(body, work, form, edges, steps - 1);
            end_capture(body);
        } else {
            // IF nodes behind one another, each with a step that tells the next one; a step left out tells it nothing
            std::vector<cudaGraphConditionalHandle> handles;
            for (int k = 1; k < steps; k++) handles.push_back(handle_for(stream, 0));
            handles.push_back({});
            launch_step(stream, work, edges, steps > 1, handles[0]);
            for (int k = 1; k < steps; k++) {
                const auto body = begin_capture(add_conditional(stream, handles[k - 1], cudaGraphCondTypeIf));
                launch_step(body, work, edges, k + 1 < steps, handles[k]);
                end_capture(body);
            }
        }
    }

    void count_edges(size_t most) {
        for (auto part : parts) {
            // room for all: a query for the count alone may be refused where edges have data
            size_t count = most;
            std::vector<cudaGraphNode_t> from(count), to(count);
            std::vector<cudaGraphEdgeData> data(count);
            if (cudaGraphGetEdges(part, from.data(), to.data(), data.data(), &count) != cudaSuccess) {
                std::printf("edges cannot be counted: %s\n", cudaGetErrorName(cudaGetLastError()));
                continue;
            }
            edges += count;
            for (size_t i = 0; i < std::min(count, most); i++)
                programmatic += data[i].type == cudaGraphDependencyTypeProgrammatic;
        }
    }

    void build(const Work& work, Form form, Edges kind, int steps) {
        try {
            CHECK(cudaGraphCreate(&root, 0));
            const auto stream = begin_capture(root);
            begin_kernel<<<1, 1, 0, stream>>>(work.state);
            add_steps(stream, work, form, kind, steps);
            end_kernel<<<1, 1, 0, stream>>>(work.state, work.n);
            CHECK(cudaGetLastError());
            end_capture(stream);
            count_edges(2 * LONGEST * work.n + 64);
            const auto start = std::chrono::steady_clock::now();
            CHECK(cudaGraphInstantiate(&exec, root, 0));
            instantiate_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
        } catch (const std::runtime_error& refused) {
            error = refused.what();
            for (auto i = streams.rbegin(); i != streams.rend(); ++i) {
                cudaGraph_t graph;
                cudaStreamEndCapture(*i, &graph);
            }
            cudaGetLastError();
        }
    }
};
