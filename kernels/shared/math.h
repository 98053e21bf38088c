// The scalar functions of docs/arithmetic.md (rule 2): a port of crates/device/src/cpu/math.rs, the same
// bits. The including language defines SHARED (function qualifier), FMA, BITS (float to uint), FLOAT (uint to
// float), and the types uint and ulong.
#ifndef CLARY_SHARED_MATH_H
#define CLARY_SHARED_MATH_H

#define CLARY_INFINITY FLOAT(0x7f800000u)
#define CLARY_NAN FLOAT(0x7fc00000u)
// 1.5 * 2^23: adding it rounds a small float to an integer (ties to even) in the low bits.
#define CLARY_ROUND 12582912.0f
// The high 15 bits of ln 2 and the rest.
#define CLARY_LN2_HIGH FLOAT(0x3f317200u)
#define CLARY_LN2_LOW FLOAT(0x35bfbe8eu)
#define CLARY_LOG2_E FLOAT(0x3fb8aa3bu)
#define CLARY_LN_2 FLOAT(0x3f317218u)

// 2^n for n from -126 to 127.
SHARED float power_of_two(int n) { return FLOAT((uint)(n + 127) << 23); }

// p * 2^n in two factors, for n from -127 to 129 and p near 1.
SHARED float scale_by_power(float p, int n) {
    int half_n = n >> 1;
    return p * power_of_two(half_n) * power_of_two((int)((uint)n - (uint)half_n));
}

// The integer in shifted = n + CLARY_ROUND.
SHARED int shifted_exponent(float shifted) { return (int)(BITS(shifted) - BITS(CLARY_ROUND)); }

// e^r for r in [-ln 2 / 2, ln 2 / 2], the polynomial of e^x.
SHARED float exp_of_rest(float r) {
    float q = FLOAT(0x3ab511a9u);
    q = FMA(q, r, FLOAT(0x3c091d36u));
    q = FMA(q, r, FLOAT(0x3d2aac7au));
    q = FMA(q, r, FLOAT(0x3e2aaa48u));
    q = FMA(q, r, FLOAT(0x3efffffeu));
    return FMA(q, r * r, r) + 1.0f;
}

// e^x; +0 below -87.
SHARED float exp_exact(float x) {
    float c = x > 89.0f ? 89.0f : x;
    c = c < -88.0f ? -88.0f : c;
    float shifted = FMA(c, CLARY_LOG2_E, CLARY_ROUND);
    float n = shifted - CLARY_ROUND;
    float r = FMA(n, -CLARY_LN2_HIGH, c);
    r = FMA(n, -CLARY_LN2_LOW, r);
    float result = scale_by_power(exp_of_rest(r), shifted_exponent(shifted));
    return x < -87.0f ? 0.0f : result;
}

// exp_exact of x from -80 to 80.
SHARED float exp_near(float x) {
    float shifted = FMA(x, CLARY_LOG2_E, CLARY_ROUND);
    float n = shifted - CLARY_ROUND;
    float r = FMA(n, -CLARY_LN2_HIGH, x);
    r = FMA(n, -CLARY_LN2_LOW, r);
    return exp_of_rest(r) * power_of_two(shifted_exponent(shifted));
}

// 2^r for r in [-1/2, 1/2], the polynomial of every form of 2^x here.
SHARED float exp2_of_rest(float r) {
    float q = FLOAT(0x3920fddeu);
    q = FMA(q, r, FLOAT(0x3aaf9f29u));
    q = FMA(q, r, FLOAT(0x3c1d96a6u));
    q = FMA(q, r, FLOAT(0x3d635774u));
    q = FMA(q, r, FLOAT(0x3e75fdeeu));
    q = FMA(q, r, CLARY_LN_2);
    return FMA(q, r, 1.0f);
}

// 2^x, exact for integers; +0 below -126.
SHARED float exp2_exact(float x) {
    float c = x > 129.0f ? 129.0f : x;
    c = c < -126.0f ? -126.0f : c;
    float shifted = c + CLARY_ROUND;
    float r = c - (shifted - CLARY_ROUND);
    float result = scale_by_power(exp2_of_rest(r), shifted_exponent(shifted));
    return x < -126.0f ? 0.0f : result;
}

// ln x, subnormals included; -inf at 0, NaN below.
SHARED float log_exact(float x) {
    int tiny = x < FLOAT(0x00800000u);
    float scaled = tiny ? x * 8388608.0f : x;
    int bits = (int)(BITS(scaled) - 0x3f3504f3u);
    int e_int = bits >> 23;
    float m = FLOAT(BITS(scaled) - ((uint)e_int << 23));
    float e = (float)(tiny ? e_int - 23 : e_int);
    float f = m - 1.0f;
    float z = f * f;
    float p = FLOAT(0x3d8a2b9eu);
    p = FMA(p, f, FLOAT(0xbdef3306u));
    p = FMA(p, f, FLOAT(0x3df3838au));
    p = FMA(p, f, FLOAT(0xbdfe0ea3u));
    p = FMA(p, f, FLOAT(0x3e119ad8u));
    p = FMA(p, f, FLOAT(0xbe2aae2eu));
    p = FMA(p, f, FLOAT(0x3e4cd265u));
    p = FMA(p, f, FLOAT(0xbe800003u));
    p = FMA(p, f, FLOAT(0x3eaaaaa4u));
    float y = FMA(e, CLARY_LN2_LOW, f * z * p);
    y = FMA(z, -0.5f, y);
    float result = FMA(e, CLARY_LN2_HIGH, f + y);
    result = x == CLARY_INFINITY ? x : result;
    result = x == 0.0f ? -CLARY_INFINITY : result;
    return x >= 0.0f ? result : CLARY_NAN;
}

SHARED float sigmoid_exact(float x) { return DIVIDE(1.0f, 1.0f + exp_exact(-x)); }

SHARED float silu_exact(float x) { return DIVIDE(x, 1.0f + exp_exact(-x)); }

// ln(1 + e^x) as max(x, 0) + log1p(e^-|x|).
SHARED float softplus_exact(float x) {
    float y = exp_exact(-FLOAT(BITS(x) & 0x7fffffffu));
    float u = 1.0f + y;
    float log1p = log_exact(u) + DIVIDE(y - (u - 1.0f), u);
    return (x > 0.0f ? x : 0.0f) + log1p;
}

// x / (1 + exp(-t)), t = x fma(x*x, c, d): GELU by the hyperbolic tangent.
SHARED float gelu_tanh(float x) {
    float t = x * FMA(x * x, FLOAT(0x3d922279u), FLOAT(0x3fcc422au));
    return DIVIDE(x, 1.0f + exp_exact(-t));
}

// The error function: near 0 an odd polynomial, beyond 1 - e^p.
SHARED float erf_exact(float x) {
    float t = FLOAT(BITS(x) & 0x7fffffffu);
    float s = x * x;
    float r = FMA(FLOAT(0xb7910000u), t, FLOAT(0x39c8e7d9u));
    float u = FMA(FLOAT(0xbb7e8a1cu), t, FLOAT(0x3cc6b1a1u));
    r = FMA(r, s, u);
    r = FMA(r, t, FLOAT(0xbddaae5cu));
    r = FMA(r, t, FLOAT(0xbf228554u));
    r = FMA(r, t, FLOAT(0xbe03ce86u));
    r = FMA(r, t, -t);
    float outer = FLOAT((BITS(1.0f - exp_exact(r)) & 0x7fffffffu) | (BITS(x) & 0x80000000u));
    float q = FLOAT(0xba1c7000u);
    q = FMA(q, s, FLOAT(0x3ba38d2cu));
    q = FMA(q, s, FLOAT(0xbcdb48d9u));
    q = FMA(q, s, FLOAT(0x3de70e23u));
    q = FMA(q, s, FLOAT(0xbec09380u));
    q = FMA(q, s, FLOAT(0x3e0375d4u));
    float inner = FMA(q, x, x);
    return t > FLOAT(0x3f6d8000u) ? outer : inner;
}

// x / 2 (1 + erf(x / sqrt 2)): GELU by the error function.
SHARED float gelu_erf(float x) { return (x * 0.5f) * (1.0f + erf_exact(x * FLOAT(0x3f3504f3u))); }

// rint(e^x * 2^40) for x <= 0; NaN gives 0.
SHARED ulong token_weight(float x) {
    float scaled = exp_exact(x) * 1099511627776.0f;
    uint bits = BITS(scaled);
    ulong small_weight = (ulong)(BITS(scaled + 8388608.0f) - BITS(8388608.0f));
    ulong large = (ulong)((bits & 0x7fffffu) | 0x800000u) << (((bits >> 23) - 150u) & 31u);
    ulong weight = scaled < 8388608.0f ? small_weight : large;
    return scaled > 0.0f ? weight : 0;
}

#endif
