// Are sums of half-precision matrix products exact integers (docs/arithmetic.md, why it is affordable)? Each
// warp takes one group: 16 rows of weights of 4 bits, 8 columns of codes, `depth` inputs (a multiple of 16,
// at most 128), summed in one f32 accumulator as the matrix kernels do, and compares all 128 sums with 64-bit
// integers.
#include "warpgroup.cuh"

SHARED uint mixed(uint x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Centered weight, -8 to 7. Kinds of groups: random; all at the edge; edges of both signs; few large among
// small.
SHARED int weight_at(uint group, uint row, uint k) {
    uint noise = mixed(group * 2048 + row * 128 + k);
    switch (group % 4) {
        case 1: return -8;
        case 2: return noise & 1 ? 7 : -8;
        default: return (int)(noise & 15) - 8;
    }
}

// Code of at most 2^14 with at most 11 significant bits.
SHARED int code_at(uint group, uint k, uint column) {
    uint noise = mixed(0x9e3779b9u + group * 1024 + k * 8 + column);
    int sign = noise >> 31 ? -1 : 1;
    switch (group % 4) {
        case 1: return column & 1 ? 16384 : -16384;
        case 2: return sign * 16384;
        case 3: return k % 16 ? sign * (int)(noise & 2047) : sign * 16384;
        default: return sign * (int)((noise & 2047) << (noise >> 11) % 4);
    }
}

SHARED uint weights_at(uint group, uint row, uint k) {
    return half_pair((float)weight_at(group, row, k), (float)weight_at(group, row, k + 1));
}
SHARED uint codes_at(uint group, uint k, uint column) {
    return half_pair((float)code_at(group, k, column), (float)code_at(group, k + 1, column));
}

extern "C" __global__ void __launch_bounds__(256) inexact_sums(uint* wrong, uint depth) {
    uint group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    uint lane = threadIdx.x % 32, g = lane / 4, t = 2 * (lane % 4);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint k = 0; k < depth; k += 16) {
        uint a0 = weights_at(group, g, k + t), a1 = weights_at(group, g + 8, k + t);
        uint a2 = weights_at(group, g, k + t + 8), a3 = weights_at(group, g + 8, k + t + 8);
        uint b0 = codes_at(group, k + t, g), b1 = codes_at(group, k + t + 8, g);
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    uint bad = 0;
    for (uint i = 0; i < 4; i++) {
        uint row = g + i / 2 * 8, column = t + i % 2;
        long long exact = 0;
        for (uint k = 0; k < depth; k++) {
            exact += (long long)weight_at(group, row, k) * code_at(group, k, column);
        }
        bad += (long long)sum[i] != exact || sum[i] != (float)(long long)sum[i];
    }
    if (bad) atomicAdd(wrong, bad);
}

// The same of a warpgroup's products, the codes times 2^-(group % 25), as aligned rows hold them (align.cu):
// down to subnormal halves. A block takes one group: 64 rows of weights, COLUMNS of codes.
template <int COLUMNS>
SHARED void check_warpgroup(uchar* smem, uint* wrong, uint depth) {
    uint group = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint g = lane / 4, t = 2 * (lane % 4);
    float unit = FLOAT((127u - group % 25) << 23);
#pragma unroll 1
    for (uint i = threadIdx.x; i < COLUMNS * depth / 2; i += blockDim.x) {
        uint k = i % (depth / 2) * 2, column = i / (depth / 2);
        float first = (float)code_at(group, k, column), second = (float)code_at(group, k + 1, column);
        uint pair = half_pair(first * unit, second * unit);
        uchar* row = smem + k / 64 * (COLUMNS * 128) + column * 128;
        *(uint*)(row + ((k % 64 / 8) ^ column % 8) * 16 + k % 8 * 2) = pair;
    }
    publish_to_products();
    __syncthreads();
    float sum[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) sum[i] = 0.0f;
#pragma unroll 1
    for (uint k = 0; k < depth; k += 16) {
        uint row = warp * 16 + g;
        uint a[4] = {weights_at(group, row, k + t), weights_at(group, row + 8, k + t),
                     weights_at(group, row, k + t + 8), weights_at(group, row + 8, k + t + 8)};
        products_begin();
        multiply_warpgroup<COLUMNS>(sum, a, operand(smem + k / 64 * (COLUMNS * 128)) + k % 64 / 8, k > 0);
        products_commit();
        products_wait<0>();
    }
    // All sums where the codes were, to be compared in a plain loop.
    __syncthreads();
    float* sums = (float*)smem;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++)
        sums[(warp * 16 + g + i % 4 / 2 * 8) * COLUMNS + i / 4 * 8 + t + i % 2] = sum[i];
    __syncthreads();
    uint bad = 0;
#pragma unroll 1
    for (uint at = threadIdx.x; at < 64 * COLUMNS; at += blockDim.x) {
        uint row = at / COLUMNS, column = at % COLUMNS;
        int exact = 0;
#pragma unroll 1
        for (uint k = 0; k < depth; k++) exact += weight_at(group, row, k) * code_at(group, k, column);
        bad += sums[at] != (float)exact * unit;
    }
    if (bad) atomicAdd(wrong, bad);
}

extern "C" __global__ void __launch_bounds__(128) inexact_warpgroup_sums(uint* wrong, uint depth) {
    extern __shared__ __align__(1024) uchar dynamic[];
    uchar* smem = dynamic + (1024 - (uint)__cvta_generic_to_shared(dynamic) % 1024) % 1024;
    check_warpgroup<32>(smem, wrong, depth);
    __syncthreads();
    check_warpgroup<64>(smem, wrong, depth);
    __syncthreads();
    check_warpgroup<96>(smem, wrong, depth);
    __syncthreads();
    check_warpgroup<128>(smem, wrong, depth);
}
