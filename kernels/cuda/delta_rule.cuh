// Steps of the gated delta rule (crates/device/src/cpu/delta_rule.rs): a warp has the 4 columns of a unit
// (states.cuh) in registers.
#pragma once
#include "states.cuh"

// Groups of 16 key indices, rounded up to a power of two, and the key dimension if it is exactly that (else
// 0): constants of the compilation.
#ifndef DELTA_STEPS
#define DELTA_STEPS 8
#define DELTA_KEY_DIM 128
#endif
#define FULL 0xffffffffu
// Longer windows are delta_scan's.
#define WINDOW_ROWS 32

// What a warp holds: STEPS groups of 16 key indices, two values of each. DK 0: the key dimension is
// pool.key_dim.
template <int STEPS>
struct Unit {
    float s[2 * STEPS];
};

// True if value 2 m + c of lane l is a key index.
template <int DK>
SHARED bool exists(uint key_dim, uint l, int m, int c) {
    return DK > 0 || l + 8 * c + 16 * m < key_dim;
}

// What lane `lane` holds of the unit at `from`.
template <int STEPS>
SHARED void load_unit(Unit<STEPS>& unit, const float* from, uint lane) {
#pragma unroll
    for (int q = 0; q < (2 * STEPS + 3) / 4; q++) {
        float4 x = *(const float4*)(from + (q * 32 + lane) * 4);
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * q + e < 2 * STEPS) unit.s[4 * q + e] = values[e];
    }
}

template <int STEPS>
SHARED void load_unit(Unit<STEPS>& unit, const float* from) {
    load_unit<STEPS>(unit, from, threadIdx.x % 32);
}

template <int STEPS>
SHARED void store_unit(const Unit<STEPS>& unit, float* to, uint lane) {
#pragma unroll
    for (int q = 0; q < (2 * STEPS + 3) / 4; q++) {
        float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * q + e < 2 * STEPS) values[e] = unit.s[4 * q + e];
        *(float4*)(to + (q * 32 + lane) * 4) = make_float4(values[0], values[1], values[2], values[3]);
    }
}

template <int STEPS>
SHARED void store_unit(const Unit<STEPS>& unit, float* to) {
    store_unit<STEPS>(unit, to, threadIdx.x % 32);
}

// The tree over 16 lanes, two of them here; all lanes of the column get the sum.
SHARED float tree_16(float low, float high) {
    float sum = low + high;
    sum = sum + __shfl_xor_sync(FULL, sum, 16);
    sum = sum + __shfl_xor_sync(FULL, sum, 8);
    return sum + __shfl_xor_sync(FULL, sum, 4);
}

// Adds the +0 products of key indices that do not exist.
template <int DK>
SHARED void pad_lanes(uint key_dim, uint l, int steps, float (&lane)[2]) {
    if (DK == 0)
        for (int c = 0; c < 2; c++)
            if (!exists<DK>(key_dim, l, steps - 1, c)) lane[c] = lane[c] + 0.0f;
}

// S *= g, and r = sum_16 of fma(S, k).
template <int STEPS, int DK>
SHARED float decay_and_recall(Unit<STEPS>& unit, const float (&k)[2 * STEPS], float g, uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
    float lane[2] = {0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (exists<DK>(key_dim, l, m, c)) {
                unit.s[2 * m + c] = unit.s[2 * m + c] * g;
                lane[c] = FMA(unit.s[2 * m + c], k[2 * m + c], lane[c]);
            }
    pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, lane);
    return tree_16(lane[0], lane[1]);
}

// S = fma(k, d, S).
template <int STEPS, int DK>
SHARED void update(Unit<STEPS>& unit, const float (&k)[2 * STEPS], float d, uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (exists<DK>(key_dim, l, m, c)) unit.s[2 * m + c] = FMA(k[2 * m + c], d, unit.s[2 * m + c]);
}

// sum_16 of fma(S, q).
template <int STEPS, int DK>
SHARED float read_out(const Unit<STEPS>& unit, const float (&q)[2 * STEPS], uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
    float lane[2] = {0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (exists<DK>(key_dim, l, m, c)) lane[c] = FMA(unit.s[2 * m + c], q[2 * m + c], lane[c]);
    pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, lane);
    return tree_16(lane[0], lane[1]);
}

// Loads a head's vector spread over the lanes of a column.
template <int STEPS, int DK>
SHARED void load_spread(float (&out)[2 * STEPS], const float* x, uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            out[2 * m + c] = exists<DK>(key_dim, l, m, c) ? x[l + 8 * c + 16 * m] : 0.0f;
}

// x / sqrt(sum_16(x*x) + eps) * scale.
template <int STEPS>
SHARED void l2_normalize(float (&x)[2 * STEPS], float scale) {
    float lane[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) lane[i % 2] = FMA(x[i], x[i], lane[i % 2]);
    float r = DIVIDE(1.0f, __fsqrt_rn(tree_16(lane[0], lane[1]) + 1e-6f));
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) x[i] = (x[i] * r) * scale;
}

struct Gates {
    float g, beta;
};

SHARED Gates gates_of(float a, float b, float decay, float dt_bias) {
    return Gates{exp_exact(-(decay * softplus_exact(a + dt_bias))), sigmoid_exact(b)};
}

// What delta_step reads besides the state; by value.
struct DeltaInputs {
    const float* mixed;    // [rows, C], q, k and v blocks
    const float* a;        // [rows, Hv]
    const float* b;        // [rows, Hv]
    const float* decay;    // [Hv]
    const float* dt_bias;  // [Hv]
    float* out;            // [rows, Hv Dv]
    float q_scale;         // the f32 nearest to 1/sqrt(Dk)
};

// What delta_scan reads of keys, queries and gates.
struct Prepared {
    float* qk;     // [rows, Hk, 2, 16 STEPS], q then k, in the order of spread_at
    float* gates;  // [rows, Hv, 2], decay and beta
};

// Values that a lane loads at once.
template <int STEPS>
struct Spread {
    static const int WIDTH = STEPS == 1 ? 2 : 4;
};

// Place of value i of lane l of a key or query in shared memory: what a lane loads at once lies together.
template <int STEPS>
SHARED uint spread_at(uint l, uint i) {
    const uint w = Spread<STEPS>::WIDTH;
    return i / w * (8 * w) + l * w + i % w;
}

template <int STEPS>
SHARED void read_spread(float (&out)[2 * STEPS], const float* x, uint l) {
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i += Spread<STEPS>::WIDTH) {
        const float* at = x + spread_at<STEPS>(l, i);
        if (STEPS == 1) {
            float2 pair = *(const float2*)at;
            out[i] = pair.x, out[i + 1] = pair.y;
        } else {
            float4 four = *(const float4*)at;
            out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
        }
    }
}

template <int STEPS>
SHARED void write_spread(const float (&x)[2 * STEPS], float* to, uint l) {
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i += Spread<STEPS>::WIDTH) {
        float* at = to + spread_at<STEPS>(l, i);
        if (STEPS == 1)
            *(float2*)at = make_float2(x[i], x[i + 1]);
        else
            *(float4*)at = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}
