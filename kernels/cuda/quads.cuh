// Quads of values of a row, and what the stage `combine` makes of them.
#pragma once
#include "common.cuh"

// Four values, aligned to 16 bytes.
SHARED void load_four(const float* from, float* x) {
    float4 v = *(const float4*)from;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

SHARED void store_four(float* to, const float* x) { *(float4*)to = make_float4(x[0], x[1], x[2], x[3]); }

// Four values of a row from `at` on (0 beyond the row).
SHARED void load_quad(const float* row, uint at, uint width, float* x) {
    if ((width & 3) == 0 && at < width) return load_four(row + at, x);
    for (uint i = 0; i < 4; i++) x[i] = at + i < width ? row[at + i] : 0.0f;
}

SHARED void store_quad(float* row, uint at, uint width, const float* x) {
    if ((width & 3) == 0 && at < width) return store_four(row + at, x);
    for (uint i = 0; i < 4; i++)
        if (at + i < width) row[at + i] = x[i];
}

// What combine reads: out[r] = sum of weights[r, i] * routed[r * k + i] in rank order from +0, then +
// sigmoid(gate[r]) * shared[r].
struct Mix {
    const float* routed;  // [rows * k, width]
    const float* weights; // [rows, k]
    const float* shared;  // [rows, width]
    const float* gate;    // [rows, 1]
    uint k;
};

// `open`: sigmoid(gate[row]). VECTOR: the width is a multiple of 4, and `at` lies below it. AHEAD: picks
// whose rows are asked for together.
template <bool VECTOR, int AHEAD>
SHARED void mix_quad(const Mix& mix, ulong row, uint at, uint width, float open, float* sum) {
    float shared[4], x[AHEAD][4], weight[AHEAD];
    if (VECTOR)
        load_four(mix.shared + row * width + at, shared);
    else
        load_quad(mix.shared + row * width, at, width, shared);
    for (uint j = 0; j < 4; j++) sum[j] = 0.0f;
    for (uint first = 0; first < mix.k; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            // What lies beyond the last pick repeats it, unused.
            ulong pair = row * mix.k + min(first + i, mix.k - 1);
            weight[i] = mix.weights[pair];
            if (VECTOR)
                load_four(mix.routed + pair * width + at, x[i]);
            else
                load_quad(mix.routed + pair * width, at, width, x[i]);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            for (uint j = 0; j < 4; j++)
                sum[j] = first + i < mix.k ? FMA(weight[i], x[i][j], sum[j]) : sum[j];
    }
    for (uint j = 0; j < 4; j++) sum[j] = FMA(open, shared[j], sum[j]);
}
