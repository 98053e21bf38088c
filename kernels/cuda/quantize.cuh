// Writing the codes shadow of an activation row: half codes [rows, width], unit and sum (both f32) [rows, groups].
#pragma once
#include "common.cuh"

struct Codes {
    ushort* codes;  // integer-valued halves, |code| <= 2^14
    float* units;
    float* sums;    // exact integers
    uint group;     // 32, 64 or 128
};

// Each group of 4 consecutive values of a row is one thread's; group/4 neighbouring lanes of a warp share a group
// (8, 16 or 32 lanes), all of them present. Quantizes x[4] with Q_14 and writes codes; the first lane of the group
// writes unit and sum. `at` is the index of x[0] in the row (a multiple of 4), `width` a multiple of 4.
SHARED void quantize_quad(const float* x, uint row, uint at, uint width, const Codes& out) {
    uint lanes = out.group / 4;
    uint magnitude = 0;
    for (int i = 0; i < 4; i++) magnitude = max(magnitude, BITS(x[i]) & 0x7fffffffu);
    for (uint h = lanes / 2; h > 0; h >>= 1)
        magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, h));
    float factor = quantize_factor(14, magnitude);
    float code[4];
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        code[i] = quantize_code(x[i], factor);
        sum = sum + code[i];
    }
    // Integers below 2^22: any order is exact.
    for (uint h = lanes / 2; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
    if (at >= width) return;
    uint2 pairs = make_uint2(half_pair(code[0], code[1]), half_pair(code[2], code[3]));
    *(uint2*)(out.codes + (ulong)row * width + at) = pairs;
    if ((threadIdx.x & (lanes - 1)) == 0) {
        uint shift = __ffs(out.group) - 1, groups = (width + out.group - 1) >> shift;
        out.units[(ulong)row * groups + (at >> shift)] = quantize_unit(14, magnitude);
        out.sums[(ulong)row * groups + (at >> shift)] = sum;
    }
}
