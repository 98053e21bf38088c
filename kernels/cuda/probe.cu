// What a card can do, for benchmarks: bytes moved, half-precision matrix products and f32 fma of registers.
#include "common.cuh"

// Copies `count` groups of 16 bytes, four in flight a thread.
extern "C" __global__ void __launch_bounds__(512) probe_copy(uint4* to, const uint4* from, ulong count) {
    ulong step = (ulong)gridDim.x * blockDim.x;
    for (ulong at = (ulong)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += 4 * step) {
        uint4 x[4];
        for (uint i = 0; i < 4; i++)
            if (at + i * step < count) x[i] = from[at + i * step];
        for (uint i = 0; i < 4; i++)
            if (at + i * step < count) to[at + i * step] = x[i];
    }
}

// `turns` products of 16 x 8 x 16 in each of eight sums a warp.
extern "C" __global__ void __launch_bounds__(256) probe_half(float* out, uint turns) {
    float sum[8][4] = {};
    uint a[4], b[2];
    for (uint i = 0; i < 4; i++) a[i] = threadIdx.x * 0x00010001u + i;
    for (uint i = 0; i < 2; i++) b[i] = threadIdx.x * 0x00010001u + i + 4;
    for (uint turn = 0; turn < turns; turn++) {
        for (uint i = 0; i < 8; i++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                         "{%0,%1,%2,%3};"
                         : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    float total = 0.0f;
    for (uint i = 0; i < 8; i++)
        for (uint j = 0; j < 4; j++) total = total + sum[i][j];
    out[(ulong)blockIdx.x * blockDim.x + threadIdx.x] = total;
}

// `turns` fma in each of 16 sums a thread.
extern "C" __global__ void __launch_bounds__(256) probe_f32(float* out, uint turns) {
    float sum[16];
    for (uint i = 0; i < 16; i++) sum[i] = (float)(threadIdx.x + i);
    float x = out[threadIdx.x];
    for (uint turn = 0; turn < turns; turn++)
        for (uint i = 0; i < 16; i++) sum[i] = FMA(sum[i], x, 1.0f);
    float total = 0.0f;
    for (uint i = 0; i < 16; i++) total = total + sum[i];
    out[(ulong)blockIdx.x * blockDim.x + threadIdx.x] = total;
}
