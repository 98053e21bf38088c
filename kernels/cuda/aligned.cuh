// Rows of codes for the prompt forms of Hopper (linear_warpgroup.cuh): all groups of a slice of 1024 inputs in
// one unit, the largest of theirs; a row whose units lie more than 2^24 apart in a slice is marked as wide.
#pragma once
#include "common.cuh"

// Aligned rows, step by step as stages of the ring hold them, so that a tile of neighbours is one copy: codes
// [step][stride][128 bytes], sums of codes in aligned units [group][stride], units [slice][stride].
// Chunk c (16 bytes) of a row lies at `chunk_place`, inputs 32 u + 8 q + 2 p of the step in word q of chunk
// 4 u + p; row n's floats at `float_place`.
struct AlignedRows {
    uchar* codes;
    float* sums;
    float* units;
    ulong stride;
};
SHARED uint chunk_place(uint row, uint c) { return row * 128 + (c ^ row % 8) * 16; }
// The floats of a lane's four rows of two row tiles are neighbours.
SHARED uint float_place(uint row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// Codes of inputs `at` and at + 1 (even), in the slice's unit.
SHARED void put_codes(const AlignedRows& to, uint row, uint at, uint pair) {
    uchar* step = to.codes + at / 64 * to.stride * 128 + at / 8 % 4 * 4;
    *(uint*)(step + chunk_place(row, at / 32 % 2 * 4 + at / 2 % 4)) = pair;
}
SHARED void put_sum(const AlignedRows& to, uint row, uint group, float sum) {
    to.sums[group * to.stride + float_place(row)] = sum;
}
SHARED void put_unit(const AlignedRows& to, uint row, uint slice, float unit) {
    to.units[slice * to.stride + float_place(row)] = unit;
}

// The rows from their next slice on.
SHARED AlignedRows next_slice(const AlignedRows& rows, uint group) {
    uchar* codes = rows.codes + 1024 / 64 * rows.stride * 128;
    float* sums = rows.sums + (1024u >> (__ffs(group) - 1)) * rows.stride;
    return AlignedRows{codes, sums, rows.units + rows.stride, rows.stride};
}
