// Rows on their way to codes, a block each: thread t has the quad of values 4 t of every slice of 1,024, so
// that a group of 32, 64 or 128 is of one quad of 8, 16 or 32 lanes. Between what makes the values and what
// puts their codes lies a barrier, for the largest magnitude of a slice; until then they are in shared
// memory, where each thread reads what it wrote itself.
#pragma once
#include "aligned.cuh"
#include "quads.cuh"
#include "quantize.cuh"

#define SLICE 1024
#define ROW_THREADS (SLICE / 4)
#define ROW_WARPS (ROW_THREADS / 32)
#define SLICES_MAX 8
#define EVERY_LANE 0xffffffffu
#define NO_MAGNITUDE 0xffffffffu

// Where codes of rows go: as they are; or aligned (aligned.cuh), with a mark for each row that does not fit,
// whose codes are needed as they are as well.
struct RowCodes {
    Codes plain;
    AlignedRows aligned;
    uint* wide;
};

// Shared memory of a row: its values, as many as whole slices have, and magnitudes of groups by quad.
struct HeldRow {
    float* values;
    uint* magnitudes;
    uint slices, group;
    // By slice and warp: the largest magnitude, and the least of those that have a unit.
    uint (*highest)[ROW_WARPS];
    uint (*least)[ROW_WARPS];
};

// `smem`: 5 bytes * slices * SLICE. All threads.
SHARED HeldRow held_row(float* smem, uint width, uint group) {
    __shared__ uint bounds[2][SLICES_MAX][ROW_WARPS];
    uint slices = (width + SLICE - 1) / SLICE;
    return HeldRow{smem, (uint*)(smem + slices * SLICE), slices, group, bounds[0], bounds[1]};
}

// The largest over a group of lanes.
SHARED uint most_of_group(uint value, uint group) {
#pragma unroll
    for (uint h = 1; h < 8; h <<= 1) value = max(value, __shfl_xor_sync(EVERY_LANE, value, h));
    if (group > 32) value = max(value, __shfl_xor_sync(EVERY_LANE, value, 8));
    if (group > 64) value = max(value, __shfl_xor_sync(EVERY_LANE, value, 16));
    return value;
}

// The sum over a group of lanes, of integers below 2^22: any order is exact.
SHARED float sum_of_group(float value, uint group) {
#pragma unroll
    for (uint h = 1; h < 8; h <<= 1) value = value + __shfl_xor_sync(EVERY_LANE, value, h);
    if (group > 32) value = value + __shfl_xor_sync(EVERY_LANE, value, 8);
    if (group > 64) value = value + __shfl_xor_sync(EVERY_LANE, value, 16);
    return value;
}

// Keeps the thread's quad of a slice, zeros beyond the row. All threads.
SHARED void hold_quad(const HeldRow& held, uint slice, const float (&x)[4]) {
    uint most = 0, at = slice * ROW_THREADS + threadIdx.x;
    store_four(held.values + 4 * at, x);
#pragma unroll
    for (uint j = 0; j < 4; j++) most = max(most, BITS(x[j]) & 0x7fffffffu);
    most = most_of_group(most, held.group);
    held.magnitudes[at] = most;
    uint highest = __reduce_max_sync(EVERY_LANE, most);
    uint least = __reduce_min_sync(EVERY_LANE, most < CLARY_MAGNITUDE_MIN_BITS ? NO_MAGNITUDE : most);
    if (threadIdx.x % 32 != 0) return;
    held.highest[slice][threadIdx.x / 32] = highest;
    held.least[slice][threadIdx.x / 32] = least;
}

// By how much the unit of a group is below that of its slice, as far as halves go. Groups of zeros are as
// they are.
SHARED uint steps_below(uint highest, uint magnitude) {
    bool zeros = magnitude < CLARY_MAGNITUDE_MIN_BITS || highest >= CLARY_MAGNITUDE_MAX_BITS;
    return zeros ? 0 : min((highest >> 23) - (magnitude >> 23), 24u);
}

// Codes of a quad in aligned units, as two pairs of halves. A half whose subnormal step stands for 1 has
// rounded to a code; what is left is to multiply by up to 2^24, a half's range at a time. In a group that
// faults codes may be NaN: its slice's unit is.
SHARED void aligned_pairs(const float (&x)[4], uint magnitude, uint below, uint (&pairs)[2]) {
    const float step = FLOAT((127u - 24u) << 23);
    float factor = quantize_factor(14, magnitude) * step;
    uint up = 24 - below, half_up = up / 2;
    // Halves of two powers of two, each twice.
    uint first = (15 + half_up) * 0x04000400u, second = (15 + up - half_up) * 0x04000400u;
#pragma unroll
    for (uint p = 0; p < 2; p++) {
        uint pair = half_pair(x[2 * p] * factor, x[2 * p + 1] * factor);
        pairs[p] = half_fma(half_fma(pair, first, 0), second, 0);
    }
}

SHARED float sum_of_pair(uint pair) {
    return half_to_float((ushort)(pair & 0xffffu)) + half_to_float((ushort)(pair >> 16));
}

// Aligned codes of the thread's quad of a slice, which `to` begins with; says whether units of the slice lie
// too far apart for that.
SHARED bool put_aligned(const HeldRow& held, uint row, uint slice, uint width, const AlignedRows& to) {
    const uint lane = threadIdx.x % 32, shift = __ffs(held.group) - 1, at = 4 * threadIdx.x;
    bool there = lane < blockDim.x / 32;
    uint highest = __reduce_max_sync(EVERY_LANE, there ? held.highest[slice][lane % ROW_WARPS] : 0);
    uint least = __reduce_min_sync(EVERY_LANE, there ? held.least[slice][lane % ROW_WARPS] : NO_MAGNITUDE);
    if (threadIdx.x == 0) {
        float unit = quantize_unit(14, highest);
        put_unit(to, row, 0, unit == 0.0f ? 1.0f : unit);
    }
    uint magnitude = held.magnitudes[slice * ROW_THREADS + threadIdx.x], pairs[2];
    float x[4];
    load_four(held.values + slice * SLICE + at, x);
    aligned_pairs(x, magnitude, steps_below(highest, magnitude), pairs);
    float sum = sum_of_group(sum_of_pair(pairs[0]) + sum_of_pair(pairs[1]), held.group);
    if (slice * SLICE + at < width) {
        put_codes(to, row, at, pairs[0]);
        put_codes(to, row, at + 2, pairs[1]);
        if ((at & (held.group - 1)) == 0) put_sum(to, row, at >> shift, sum);
    }
    bool known = least != NO_MAGNITUDE && highest < CLARY_MAGNITUDE_MAX_BITS;
    return known && (highest >> 23) - (least >> 23) > 24;
}

// The row's codes, after all its quads were held. All threads.
SHARED void put_row(const HeldRow& held, uint row, uint width, const RowCodes& to) {
    bool plain = to.plain.codes != nullptr;
    __syncthreads();
    if (to.aligned.codes) {
        plain = false;
        AlignedRows rows = to.aligned;
        for (uint slice = 0; slice < held.slices; slice++) {
            plain |= put_aligned(held, row, slice, width, rows);
            rows = next_slice(rows, held.group);
        }
        if (threadIdx.x == 0) to.wide[row] = plain;
    }
    for (uint slice = 0; plain && slice < held.slices; slice++) {
        float x[4];
        load_four(held.values + slice * SLICE + 4 * threadIdx.x, x);
        quantize_quad(x, row, slice * SLICE + 4 * threadIdx.x, width, to.plain);
    }
}
