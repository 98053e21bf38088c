// Router picks of one row by one warp (crates/device/src/cpu/route.rs).
#pragma once
#include "common.cuh"

// Orders floats as numbers do, equal zeros included; every NaN comes below every number.
SHARED uint order_key(float x) {
    uint bits = BITS(x + 0.0f);
    uint key = bits >> 31 == 0 ? bits | 0x80000000u : ~bits;
    return x != x ? 0u : key;
}

// The k best of `experts` logits, best first (ties to the lower id), k <= 32: lane i gets pick i and its
// weight. A NaN logit anywhere makes all weights NaN. VALUES: experts / 32, rounded up.
template <int VALUES>
SHARED void route_row(const float* logits, uint experts, uint k, uint& id, float& weight) {
    const uint all = 0xffffffffu;
    uint lane = threadIdx.x % 32;
    uint key[VALUES];
    bool fault = false;
    // Keys are made 33 bits: `left` says which may still be picked.
    uint left = 0;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        uint expert = lane + 32 * i;
        float logit = expert < experts ? logits[expert] : 0.0f;
        key[i] = order_key(logit);
        fault |= logit != logit;
        if (expert < experts) left |= 1u << i;
    }
    fault = __any_sync(all, fault);
    id = 0;
    for (uint pick = 0; pick < k; pick++) {
        uint best = 0, own = 0;
        bool has = false;
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            if (left >> i & 1 && (!has || key[i] > best)) has = true, best = key[i], own = i;
        uint top = __reduce_max_sync(all, has ? best : 0u);
        uint candidate = has && best == top ? lane + 32 * own : 0xffffffffu;
        uint chosen = __reduce_min_sync(all, candidate);
        if (chosen % 32 == lane) left &= ~(1u << chosen / 32);
        if (lane == pick) id = chosen;
    }
    float best = logits[__shfl_sync(all, id, 0)];
    float e = lane < k ? (fault ? CLARY_NAN : exp_exact(logits[id] - best)) : 0.0f;
    float sum = 0.0f;
    for (uint pick = 0; pick < k; pick++) sum = sum + __shfl_sync(all, e, pick);
    weight = DIVIDE(e, sum);
}
