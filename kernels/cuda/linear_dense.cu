// linear, prompt form of dense matrices: an f32 fma dot over 64 lanes, lane = k mod 64, then the halving tree
// (docs/arithmetic.md, dense matrix). Compiled for DENSE_DTYPE.
//
// 64 threads, one a lane, share 8 rows by 8 outputs; a block has 2 by 4 such groups: 16 rows by 32 outputs.
// Each thread reads 16 values for 64 fused multiply-adds; neighbouring groups find them in the nearest cache.
// Grid x: blocks of outputs; y: of rows. Dynamic shared memory: 64 KiB, where the upper 32 lanes meet the
// lower ones.
#include "linear.cuh"

#define LANES 64
#define SIDE 8

template <int DTYPE>
SHARED float load_weight(const uchar* weights, ulong at) {
    return DTYPE == 2 ? ((const float*)weights)[at] : stored_float<DTYPE>(((const ushort*)weights)[at], 0);
}

extern "C" __global__ void __launch_bounds__(512)
    linear_dense(const float* x, const uchar* weights, float* out, uint rows, uint cols, uint outputs) {
    extern __shared__ float upper[];
    wait_for_launches_before();
    start_next_launch();
    uint lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    uint row = blockIdx.y * 16 + group / 4 * SIDE, output = blockIdx.x * 32 + group % 4 * SIDE;
    float sums[SIDE][SIDE];
#pragma unroll
    for (int r = 0; r < SIDE; r++)
#pragma unroll
        for (int o = 0; o < SIDE; o++) sums[r][o] = 0.0f;
#pragma unroll 2
    for (uint k = lane; k < (cols + LANES - 1) / LANES * LANES; k += LANES) {
        float a[SIDE], b[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            a[i] = k < cols ? x[(ulong)min(row + i, rows - 1) * cols + k] : 0.0f;
            b[i] = k < cols
                       ? load_weight<DENSE_DTYPE>(weights, (ulong)min(output + i, outputs - 1) * cols + k)
                       : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < SIDE; r++)
#pragma unroll
            for (int o = 0; o < SIDE; o++) sums[r][o] = FMA(b[o], a[r], sums[r][o]);
    }
    float* mine = upper + group * SIDE * SIDE * 32;
    if (lane >= 32)
#pragma unroll
        for (int i = 0; i < SIDE * SIDE; i++) mine[i * 32 + lane - 32] = sums[i / SIDE][i % SIDE];
    __syncthreads();
    if (lane >= 32) return;
#pragma unroll
    for (int i = 0; i < SIDE * SIDE; i++) {
        float value = sums[i / SIDE][i % SIDE] + mine[i * 32 + lane];
#pragma unroll
        for (int h = 16; h > 0; h /= 2) value = value + __shfl_xor_sync(0xffffffffu, value, h);
        uint r = row + i / SIDE, o = output + i % SIDE;
        if (lane == i % 32 && r < rows && o < outputs) out[(ulong)r * outputs + o] = value;
    }
}
