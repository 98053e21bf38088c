// Gated norm of heads of 128 values (rows.cu has the other widths): a warp has a head. Lane t has the values
// 2 t and 2 t + 1 of each half of 64, so a half is a group of 64 codes, and most of sum_256's tree is between
// lanes. Bound by memory in prompts, by latency in decode.
#include "quantize.cuh"

#define HEAD 128
#define EVERY_LANE 0xffffffffu

// sum_256 of the head's squares: 256 lanes of which 128 have one value.
SHARED float squares_of_head(const float2 (&x)[2]) {
    float2 sum;
    sum.x = FMA(x[0].x, x[0].x, 0.0f) + FMA(x[1].x, x[1].x, 0.0f);
    sum.y = FMA(x[0].y, x[0].y, 0.0f) + FMA(x[1].y, x[1].y, 0.0f);
#pragma unroll
    for (int h = 16; h > 0; h >>= 1) {
        sum.x = sum.x + __shfl_xor_sync(EVERY_LANE, sum.x, h);
        sum.y = sum.y + __shfl_xor_sync(EVERY_LANE, sum.y, h);
    }
    return sum.x + sum.y;
}

// Largest magnitude of the group of each half, in groups of 32, 64 or 128.
SHARED void magnitudes_of_groups(uint (&magnitude)[2], uint group) {
    if (group == 128) magnitude[0] = magnitude[1] = max(magnitude[0], magnitude[1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int h = 1; h < 16; h <<= 1)
            magnitude[i] = max(magnitude[i], __shfl_xor_sync(EVERY_LANE, magnitude[i], h));
        if (group > 32) magnitude[i] = max(magnitude[i], __shfl_xor_sync(EVERY_LANE, magnitude[i], 16));
    }
}

// Writes the codes of a head that begins at value `base` of a row of `width`.
SHARED void store_codes(const float2 (&x)[2], uint row, uint base, uint width, const Codes& to) {
    uint lane = threadIdx.x % 32, magnitude[2];
#pragma unroll
    for (int i = 0; i < 2; i++) magnitude[i] = max(BITS(x[i].x) & 0x7fffffffu, BITS(x[i].y) & 0x7fffffffu);
    magnitudes_of_groups(magnitude, to.group);
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float factor = quantize_factor(14, magnitude[i]);
        float low = quantize_code(x[i].x, factor), high = quantize_code(x[i].y, factor);
        *(uint*)(to.codes + (ulong)row * width + base + 64 * i + 2 * lane) = half_pair(low, high);
        sum[i] = low + high;
    }
    // Integers below 2^22: any order is exact.
    if (to.group == 128) sum[0] = sum[0] + sum[1];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int h = 1; h < 16; h <<= 1) sum[i] = sum[i] + __shfl_xor_sync(EVERY_LANE, sum[i], h);
        if (to.group > 32) sum[i] = sum[i] + __shfl_xor_sync(EVERY_LANE, sum[i], 16);
    }
    ulong at = (ulong)row * (width / to.group) + base / to.group;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint first = 64 * i + 2 * lane;
        if (first % to.group != 0) continue;
        to.units[at + first / to.group] = quantize_unit(14, magnitude[i]);
        to.sums[at + first / to.group] = sum[i];
    }
}

// x = ((x * r) * weight) * silu(z) by head, and the codes of x where they are asked for. Grid [blocks of 8
// heads of all rows], 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    gated_norm_128(float* x, const float* z, const float* weight, uint heads, uint count, float eps,
                   Codes codes) {
    uint head = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    float2 w[2], g[2], of[2];
#pragma unroll
    for (int i = 0; i < 2; i++) w[i] = *(const float2*)(weight + 64 * i + 2 * lane);
    wait_for_launches_before();
    start_next_launch();
    if (head >= count) return;
    float* to = x + (ulong)head * HEAD + 2 * lane;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        of[i] = *(const float2*)(to + 64 * i);
        g[i] = *(const float2*)(z + (ulong)head * HEAD + 64 * i + 2 * lane);
    }
    float r = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(squares_of_head(of), (float)HEAD) + eps));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        of[i].x = ((of[i].x * r) * w[i].x) * silu_exact(g[i].x);
        of[i].y = ((of[i].y * r) * w[i].y) * silu_exact(g[i].y);
        *(float2*)(to + 64 * i) = of[i];
    }
    if (codes.codes) store_codes(of, head / heads, head % heads * HEAD, heads * HEAD, codes);
}
