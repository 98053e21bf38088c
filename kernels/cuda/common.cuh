// What every kernel includes: types without any system header, the shared scalar functions, half conversion
// and programmatic dependent launch. Compiled by NVRTC with --fmad=false and correctly rounded division and
// roots.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;

#define SHARED __device__ __forceinline__
#define FMA(a, b, c) __fmaf_rn(a, b, c)
#define DIVIDE(a, b) __fdiv_rn(a, b)
#define BITS(x) __float_as_uint(x)
#define FLOAT(x) __uint_as_float(x)

#include "shared/math.h"
#include "shared/philox.h"
#include "shared/quantize.h"

// Bits of the half nearest to x; exact for codes.
SHARED ushort half_bits(float x) {
    ushort h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

SHARED float half_to_float(ushort h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

SHARED float bf16_to_float(ushort h) { return FLOAT((uint)h << 16); }

// Two floats as a pair of halves, the first in the low bits.
SHARED uint half_pair(float low, float high) {
    uint pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// a b + c of two halves each.
SHARED uint half_fma(uint a, uint b, uint c) {
    uint d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Waits for the launches before this one; what they wrote may be read only after it. A kernel calls it once,
// after loading what no launch writes (weights).
SHARED void wait_for_launches_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch start its prologue.
SHARED void start_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// sum over the block of per-thread lanes: lane[i] += lane[i + h], h = L/2 ... 1, L = 256 threads; every
// thread gets the result. lanes: 256 floats of shared memory. All warps add the same, so that one barrier is
// enough.
SHARED float tree_256(float value, float* lanes) {
    uint t = threadIdx.x;
    if (t < 256) lanes[t] = value;
    __syncthreads();
    float x[8];
#pragma unroll
    for (uint i = 0; i < 8; i++) x[i] = lanes[t % 32 + 32 * i];
#pragma unroll
    for (uint h = 4; h > 0; h >>= 1)
#pragma unroll
        for (uint i = 0; i < h; i++) x[i] = x[i] + x[i + h];
#pragma unroll
    for (uint h = 16; h > 0; h >>= 1) x[0] = x[0] + __shfl_xor_sync(0xffffffffu, x[0], h);
    return x[0];
}
