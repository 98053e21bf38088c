// What attention.cu and attention_few.cu share: copies of a span's blocks into shared memory, and results.
#pragma once
#include "attention.cuh"

// Blocks of V that are on their way.
#define RING (4 / DIGITS)
// Bytes of V that a warp has of a block: 8 GROUPS dims of one digit.
#define SLICE (8 * GROUPS * KEYS)

SHARED void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// kv_block with the constants of the compilation.
SHARED KvBlock span_block(const KvPool& pool, uint page, uint kv_head) {
    ulong at = (ulong)page * pool.kv_heads + kv_head;
    return KvBlock{pool.codes + at * (2 * DIGITS * PLANE), pool.scales + at * ((GROUPS + 1) * KEYS)};
}

// Queues the copy of all scales of a block into shared memory, by one warp.
SHARED void copy_scales(float* to, const KvBlock& block) {
    for (uint i = threadIdx.x % 32 * 4; i < (GROUPS + 1) * KEYS; i += 128)
        copy_async_16(to + i, block.scales + i);
}

// Queues the copy of a warp's dims of a block's V.
SHARED void copy_values(schar (&to)[DIGITS][SLICE], const KvBlock& from) {
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++)
#pragma unroll
        for (uint i = 0; i < SLICE; i += 512)
            copy_async_16(to[digit] + i + lane * 16,
                          from.codes + (DIGITS + digit) * PLANE + warp * SLICE + i + lane * 16);
}

// Writes the lane's dims of a vector, times a factor.
SHARED void write_dims(const float (&held)[GROUPS][2], float factor, float* to, uint head_dim) {
    uint first = threadIdx.x / 32 * (8 * GROUPS) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int d = 0; d < GROUPS; d++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint dim = first + 8 * d + e;
            if (dim < head_dim) to[dim] = held[d][e] * factor;
        }
}

// Writes the lane's part of a vector at `index`: the result, or this span's part where there are more.
SHARED void write_vector(const float (&held)[GROUPS][2], const Fold& fold, uint index, float* out,
                         const Partial& partial, ulong part, uint head_dim) {
    if (index < SPAN_BLOCKS * KEYS) return write_dims(held, DIVIDE(1.0f, fold.sum), out, head_dim);
    write_dims(held, 1.0f, partial.values + part * (64 * GROUPS), head_dim);
    if (threadIdx.x / 32 == 0 && threadIdx.x % 4 == 0)
        *(float2*)(partial.folds + 2 * part) = make_float2(fold.max, fold.sum);
}
