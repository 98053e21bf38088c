// The stage `route`.
#include "route.cuh"

// Experts of a lane, a constant of the compilation.
#ifndef ROUTE_VALUES
#define ROUTE_VALUES 8
#endif

// Grid [rows], 32 threads. Up to 32 ROUTE_VALUES experts, k up to 32.
extern "C" __global__ void __launch_bounds__(32)
    route(const float* logits, uint experts, uint k, uint* ids, float* weights) {
    start_next_launch();
    wait_for_launches_before();
    uint row = blockIdx.x;
    logits += (ulong)row * experts;
    uint id = route_picks<ROUTE_VALUES>(logits, experts, k);
    float weight = route_weights(logits, experts, k, id);
    if (threadIdx.x < k) {
        ids[(ulong)row * k + threadIdx.x] = id;
        weights[(ulong)row * k + threadIdx.x] = weight;
    }
}
