// silu and sigmoid of four values at once, the bits of math.h. There each value has branches, and bounds of
// its own, so that nothing of another one fills its latencies; here one branch tells whether all four are
// ordinary numbers.
#pragma once
#include "common.cuh"

// About 1 / x of a normal x below 2^126.
SHARED float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// x / d, correctly rounded, where both and the quotient are far from the ends of the range.
SHARED float divide_near(float x, float d) {
    float r = reciprocal(d);
    r = FMA(r, FMA(-d, r, 1.0f), r);
    float q = r * x;
    return FMA(r, FMA(-d, q, x), q);
}

// Are the magnitudes of all four between 2^-40 and 27? NaN counts as that: it comes out as NaN.
SHARED bool all_near(const float (&x)[4]) {
    float least = fminf(fminf(fabsf(x[0]), fabsf(x[1])), fminf(fabsf(x[2]), fabsf(x[3])));
    float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    return least > FLOAT((127u - 40u) << 23) && most < 27.0f;
}

SHARED void silu_quad(float (&x)[4]) {
    if (all_near(x)) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = divide_near(x[i], 1.0f + exp_near(-x[i]));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = silu_exact(x[i]);
    }
}

SHARED void sigmoid_quad(float (&x)[4]) {
    if (all_near(x)) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = divide_near(1.0f, 1.0f + exp_near(-x[i]));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = sigmoid_exact(x[i]);
    }
}
