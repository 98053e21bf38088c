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
// pick i; 0 beyond k. VALUES: experts / 32, rounded up to a power of two.
template <int VALUES>
SHARED uint route_picks(const float* logits, uint experts, uint k) {
    const uint all = 0xffffffffu;
    uint lane = threadIdx.x % 32;
    // A lane's experts are lane, lane + 32, ...: it sorts them, then the best of all lanes' first ones is
    // taken.
    uint key[VALUES], own[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        uint expert = lane + 32 * i;
        // What does not exist comes last: numbers and NaN are above 0.
        key[i] = expert < experts ? max(order_key(logits[expert]), 1u) : 0u;
        own[i] = i;
    }
    // Batcher's odd-even merge sort.
#pragma unroll
    for (int p = 1; p < VALUES; p *= 2)
#pragma unroll
        for (int h = p; h >= 1; h /= 2)
#pragma unroll
            for (int i = 0; i + h < VALUES; i++) {
                bool compared = i >= h % p && (i - h % p) / h % 2 == 0 && i / (2 * p) == (i + h) / (2 * p);
                if (!compared) continue;
                bool swap = key[i] < key[i + h] || (key[i] == key[i + h] && own[i] > own[i + h]);
                uint low_key = swap ? key[i] : key[i + h], low_own = swap ? own[i] : own[i + h];
                key[i] = swap ? key[i + h] : key[i], own[i] = swap ? own[i + h] : own[i];
                key[i + h] = low_key, own[i + h] = low_own;
            }
    uint id = 0;
    for (uint pick = 0; pick < k; pick++) {
        uint top = __reduce_max_sync(all, key[0]), candidate = lane + 32 * own[0];
        uint chosen = __reduce_min_sync(all, key[0] == top ? candidate : 0xffffffffu);
        if (lane == pick) id = chosen;
        if (chosen != candidate) continue;
#pragma unroll
        for (int i = 0; i + 1 < VALUES; i++) key[i] = key[i + 1], own[i] = own[i + 1];
        key[VALUES - 1] = 0;
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
