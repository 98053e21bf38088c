// Router picks of one row by one warp (crates/device/src/cpu/route.rs).
#pragma once
#include "common.cuh"

// Orders floats as numbers do, equal zeros included; every NaN comes below every number.
SHARED uint order_key(float x) {
    uint bits = BITS(x + 0.0f);
    uint key = bits >> 31 == 0 ? bits | 0x80000000u : ~bits;
    return x != x ? 0u : key;
}

// The k best of `experts` logits, best first (ties to the lower id), k <= min(32, experts): lane i gets
// pick i; 0 beyond k. VALUES: experts / 32, rounded up to a power of two. A block does it once, so what takes
// time is to fetch the code: a loop over the picks is shorter than sorting first.
template <int VALUES>
SHARED uint route_picks(const float* logits, uint experts, uint k) {
    const uint all = 0xffffffffu;
    // A lane's experts are lane, lane + 32, ...
    uint lane = threadIdx.x % 32, key[VALUES], id = 0;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        uint expert = lane + 32 * i;
        // What does not exist comes last: numbers and NaN are above 0.
        key[i] = expert < experts ? max(order_key(logits[expert]), 1u) : 0u;
    }
#pragma unroll 1
    for (uint pick = 0; pick < k; pick++) {
        uint best = key[0], candidate = 0xffffffffu;
#pragma unroll
        for (int i = 1; i < VALUES; i++) best = max(best, key[i]);
        uint top = __reduce_max_sync(all, best);
#pragma unroll
        for (int i = VALUES - 1; i >= 0; i--)
            if (key[i] == top) candidate = lane + 32 * i;
        uint chosen = __reduce_min_sync(all, candidate);
        if (lane == pick) id = chosen;
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            if (chosen == lane + 32 * i) key[i] = 0;
    }
    return id;
}

// Weights of a row's picks, on their lanes. A NaN logit anywhere makes all of them NaN.
SHARED float route_weights(const float* logits, uint experts, uint k, uint id) {
    const uint all = 0xffffffffu;
    uint lane = threadIdx.x % 32;
    bool fault = false;
    for (uint expert = lane; expert < experts; expert += 32) fault |= logits[expert] != logits[expert];
    fault = __any_sync(all, fault);
    float best = logits[__shfl_sync(all, id, 0)];
    float e = lane < k ? (fault ? CLARY_NAN : exp_exact(logits[id] - best)) : 0.0f;
    float sum = 0.0f;
    for (uint pick = 0; pick < k; pick++) sum = sum + __shfl_sync(all, e, pick);
    return DIVIDE(e, sum);
}
