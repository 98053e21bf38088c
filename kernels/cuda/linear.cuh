// Grouped matrices: packed layout, fragments and the product of one slice. docs/arithmetic.md, grouped
// matrix.
//
// Layout (crates/device/src/cuda/packing.rs writes it). A *tile* is 16 outputs, a *step* 64 inputs, a *slice*
// 16 steps. Lane l = 4 g + q of a warp owns, of outputs g and g + 8 and of each *unit* t of 32 inputs of a
// step, the inputs 32 t + 8 q .. + 7: what mma.m16n8k16 wants of lane l when both operands permute k the same
// way. Codes lie in bit planes of width 4, 2 or 1 (2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 6 = 4 + 2, 8 = 4 + 4,
// low bits first): [tile][step][plane][lane][width words]. Inputs come in pairs (2p, 2p + 1), the first in
// the low 16 bits of a word, so that one mask yields two halves; pair p of unit t and half h (output g + 8 h)
// is field
//   width 4: p of word 2 t + h;  width 2: p + 4 h of word t;  width 1: p + 4 h + 8 t of the one word.
// Scales and biases as stored: [tile][group][g]{scale g, scale g + 8, bias g, bias g + 8}.
#pragma once
#include "common.cuh"

#define STEP 64
#define SLICE_STEPS 16

// How a grouped matrix is stored. DTYPE: 0 bf16, 1 f16, 2 f32.
template <int BITS_, int GROUP_, bool AFFINE_, int DTYPE_>
struct Scheme {
    static const int BITS = BITS_, GROUP = GROUP_, DTYPE = DTYPE_;
    static const bool AFFINE = AFFINE_;
    // Widths above 4 are two digits: code = 16 h + l, each digit's dot exact in f32.
    static const bool WIDE = BITS_ > 4;
    static const int STEP_WORDS = 32 * BITS_;
    static const int GROUP_BYTES = 8 * (AFFINE_ ? 4 : 2) * (DTYPE_ == 2 ? 4 : 2);
    static const int SLICE_GROUPS = 1024 / GROUP_;
    // Codes of a slice in shared memory; its scales follow them.
    static const int CODE_BYTES = SLICE_STEPS * STEP_WORDS * 4;
};

// A way of storing as a number: bits | dtype << 4 | affine << 6 | group << 8; bits 0 is dense. A file is
// compiled for the KINDS ways that its launch mixes, KIND0, KIND1, ...
template <uint CODE>
struct Kind {
    static const bool DENSE = (CODE & 15) == 0;
    static const int DTYPE = CODE >> 4 & 3;
    // Of dense ones only a placeholder.
    typedef Scheme<(CODE & 15) == 0 ? 4 : CODE & 15, (CODE & 15) == 0 ? 64 : (CODE >> 8),
                   (CODE >> 6 & 1) == 1, DTYPE>
        Stored;
};

// f(Kind) of kind number `kind`.
template <class F>
SHARED void with_kind(uint kind, F f) {
#if KINDS > 7
    if (kind == 7) return f(Kind<KIND7>());
#endif
#if KINDS > 6
    if (kind == 6) return f(Kind<KIND6>());
#endif
#if KINDS > 5
    if (kind == 5) return f(Kind<KIND5>());
#endif
#if KINDS > 4
    if (kind == 4) return f(Kind<KIND4>());
#endif
#if KINDS > 3
    if (kind == 3) return f(Kind<KIND3>());
#endif
#if KINDS > 2
    if (kind == 2) return f(Kind<KIND2>());
#endif
#if KINDS > 1
    if (kind == 1) return f(Kind<KIND1>());
#endif
    f(Kind<KIND0>());
}

// What a row's group brings to the scaling: unit u, csum * u; for two digits also the terms that center them.
struct Unit {
    float unit, sum_unit;
};
struct WideUnit {
    float unit, sum_unit, high, low;
};
template <bool WIDE>
struct UnitOf {
    typedef Unit Type;
};
template <>
struct UnitOf<true> {
    typedef WideUnit Type;
};

SHARED void make_unit(float unit, float sum, Unit& out) { out = Unit{unit, sum * unit}; }
// I = 16 I1 + I0 + 8 csum, with digits centered by 2^(BITS-5) and 8. As (16 (I1 + csum div 2) + (I0 + 8 (csum
// mod 2)): both sums are integers of at most 2^24, so one fma rounds once.
SHARED void make_unit(float unit, float sum, WideUnit& out) {
    float high = floorf(sum * 0.5f);
    out = WideUnit{unit, sum * unit, high, 8.0f * (sum - 2.0f * high)};
}

// (a & mask) | magic in one instruction.
SHARED uint mask_or(uint a, uint mask, uint magic) {
    uint d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
    return d;
}

// Two equal halves of a small dyadic number with sign: (-1)^NEGATIVE * NUMERATOR / 2^SHIFT.
constexpr __host__ __device__ uint half_constant(int numerator, int shift, bool negative) {
    int top = 0;
    while ((numerator >> (top + 1)) != 0) top++;
    uint exponent = (uint)(top - shift + 15);
    uint mantissa = (uint)((numerator - (1 << top)) << 10 >> top);
    uint h = (negative ? 0x8000u : 0u) | exponent << 10 | mantissa;
    return h | h << 16;
}

// Field F of a plane's word, less CENTER, as two halves. Under the mask, 1024 + (field << at); the fma takes
// both away exactly.
template <int WIDTH, int F, int CENTER>
SHARED uint digit(uint word) {
    const int place = WIDTH * F;
    const int at = place + WIDTH <= 10 ? place : place - 8;
    const uint mask = (((1u << WIDTH) - 1) << at) * 0x00010001u;
    uint source = place + WIDTH <= 10 ? word : word >> 8;
    const uint scale = half_constant(1, at, false);
    const uint offset = half_constant((1024 >> at) + CENTER, 0, true);
    return half_fma(mask_or(source, mask, 0x64006400u), scale, offset);
}

// Three bits out of a 2-bit and a 1-bit plane, less 4.
template <int F2, int F1>
SHARED uint digit_3(uint low, uint high) {
    uint top = F1 >= 2 ? high >> (F1 >= 2 ? F1 - 2 : 0) : high << (F1 >= 2 ? 0 : 2 - F1);
    uint bits = mask_or(top, 0x00040004u, 0x64006400u);
    bits = mask_or(low >> (2 * F2), 0x00030003u, bits);
    return half_fma(bits, half_constant(1, 0, false), half_constant(1024 + 4, 0, true));
}

// Words of one lane of a step.
template <class S>
struct StepWords {
    uint w[S::BITS];
};

// The plane of WIDTH words at `base` (of the step's plane), lane's part.
template <int WIDTH>
SHARED void load_plane(uint* words, const uint* base, uint lane) {
    if (WIDTH == 4) {
        uint4 v = ((const uint4*)base)[lane];
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if (WIDTH == 2) {
        uint2 v = ((const uint2*)base)[lane];
        words[0] = v.x, words[1] = v.y;
    } else {
        words[0] = base[lane];
    }
}

template <class S>
SHARED void load_step(StepWords<S>& words, const uint* step, uint lane) {
    const int first = S::BITS >= 4 ? 4 : 2;
    load_plane<first>(words.w, step, lane);
    if (S::BITS > first)
        load_plane<(S::BITS == 8 ? 4 : S::BITS == 6 ? 2 : 1)>(words.w + first, step + 32 * first, lane);
}

// A fragment of the digit's 16 outputs by 16 inputs (pairs 2 M, 2 M + 1 of unit T). HIGH: the upper digit.
template <class S, int T, int M, bool HIGH>
SHARED void fragment(uint a[4], const StepWords<S>& s) {
    const int p = 2 * M;
    if (S::BITS == 2) {
        a[0] = digit<2, p, 2>(s.w[T]), a[1] = digit<2, p + 4, 2>(s.w[T]);
        a[2] = digit<2, p + 1, 2>(s.w[T]), a[3] = digit<2, p + 5, 2>(s.w[T]);
    } else if (S::BITS == 3) {
        uint high = s.w[S::BITS - 1];
        a[0] = digit_3<p, p + 8 * T>(s.w[T], high), a[1] = digit_3<p + 4, p + 4 + 8 * T>(s.w[T], high);
        a[2] = digit_3<p + 1, p + 1 + 8 * T>(s.w[T], high),
        a[3] = digit_3<p + 5, p + 5 + 8 * T>(s.w[T], high);
    } else if (!HIGH) {
        const uint* w = s.w + 2 * T;
        a[0] = digit<4, p, 8>(w[0]), a[1] = digit<4, p, 8>(w[1]);
        a[2] = digit<4, p + 1, 8>(w[0]), a[3] = digit<4, p + 1, 8>(w[1]);
    } else if (S::BITS == 8) {
        const uint* w = s.w + S::BITS - 4 + 2 * T;
        a[0] = digit<4, p, 8>(w[0]), a[1] = digit<4, p, 8>(w[1]);
        a[2] = digit<4, p + 1, 8>(w[0]), a[3] = digit<4, p + 1, 8>(w[1]);
    } else if (S::BITS == 6) {
        uint w = s.w[S::BITS - 2 + T];
        a[0] = digit<2, p, 2>(w), a[1] = digit<2, p + 4, 2>(w);
        a[2] = digit<2, p + 1, 2>(w), a[3] = digit<2, p + 5, 2>(w);
    } else {
        uint w = s.w[S::BITS - 1];
        a[0] = digit<1, p + 8 * T, 1>(w), a[1] = digit<1, p + 4 + 8 * T, 1>(w);
        a[2] = digit<1, p + 1 + 8 * T, 1>(w), a[3] = digit<1, p + 5 + 8 * T, 1>(w);
    }
}

#ifdef PLAIN_SUMS
// The product below without the matrix instruction, for cards whose instruction does not sum exactly: each
// partial sum of a group is an integer of at most 2^24, so f32 adds are exact in any order. A call, not in
// line: it is long.
__device__ __noinline__ float4 plain_product(float4 sums, uint4 a, uint b0, uint b1) {
    uint lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
    float d[4] = {sums.x, sums.y, sums.z, sums.w};
    auto dot = [](uint x, uint y, float sum) {
        sum = FMA(half_to_float((ushort)x), half_to_float((ushort)y), sum);
        return FMA(half_to_float((ushort)(x >> 16)), half_to_float((ushort)(y >> 16)), sum);
    };
    // Lane `row + q` has the inputs 2 q, 2 q + 1 and 8 more of both rows, lane `column + 4 e + q` those of
    // column e.
#pragma unroll
    for (uint q = 0; q < 4; q++) {
        uint x[4] = {__shfl_sync(0xffffffffu, a.x, row + q), __shfl_sync(0xffffffffu, a.y, row + q),
                     __shfl_sync(0xffffffffu, a.z, row + q), __shfl_sync(0xffffffffu, a.w, row + q)};
        uint y[2][2];
#pragma unroll
        for (uint e = 0; e < 2; e++) {
            y[e][0] = __shfl_sync(0xffffffffu, b0, column + 4 * e + q);
            y[e][1] = __shfl_sync(0xffffffffu, b1, column + 4 * e + q);
        }
#pragma unroll
        for (uint i = 0; i < 4; i++) d[i] = dot(x[i / 2 + 2], y[i % 2][1], dot(x[i / 2], y[i % 2][0], d[i]));
    }
    return make_float4(d[0], d[1], d[2], d[3]);
}
#endif

// d += a b on integers of halves: exact while sums stay within 2^24.
SHARED void mma(float d[4], const uint a[4], uint b0, uint b1) {
#ifdef PLAIN_SUMS
    float4 sums = make_float4(d[0], d[1], d[2], d[3]);
    sums = plain_product(sums, make_uint4(a[0], a[1], a[2], a[3]), b0, b1);
    d[0] = sums.x, d[1] = sums.y, d[2] = sums.z, d[3] = sums.w;
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

template <int DTYPE>
SHARED float stored_float(uint pair, int which) {
    return DTYPE == 1 ? half_to_float((ushort)(which ? pair >> 16 : pair))
                      : FLOAT(which ? pair & 0xffff0000u : pair << 16);
}

// Scales of outputs g and g + 8 and what the sum of codes is multiplied by, of one group.
struct Scales {
    float scale[2], bias[2];
};

template <class S>
SHARED Scales load_scales(const uchar* params, uint group, uint g) {
    const uchar* at = params + group * S::GROUP_BYTES + g * (S::GROUP_BYTES / 8);
    Scales s;
    if (S::DTYPE == 2) {
        float2 v = *(const float2*)at;
        s.scale[0] = v.x, s.scale[1] = v.y;
        if (S::AFFINE) {
            v = *(const float2*)(at + 8);
            s.bias[0] = v.x, s.bias[1] = v.y;
        }
    } else if (S::AFFINE) {
        uint2 v = *(const uint2*)at;
        s.scale[0] = stored_float<S::DTYPE>(v.x, 0), s.scale[1] = stored_float<S::DTYPE>(v.x, 1);
        s.bias[0] = stored_float<S::DTYPE>(v.y, 0), s.bias[1] = stored_float<S::DTYPE>(v.y, 1);
    } else {
        uint v = *(const uint*)at;
        s.scale[0] = stored_float<S::DTYPE>(v, 0), s.scale[1] = stored_float<S::DTYPE>(v, 1);
    }
    const float center = (float)(1 << (S::BITS - 1));
    if (S::AFFINE) {
        s.bias[0] = FMA(center, s.scale[0], s.bias[0]);
        s.bias[1] = FMA(center, s.scale[1], s.bias[1]);
    }
    return s;
}

// The group's exact sum of one output and row; `high` is the upper digit's.
SHARED float exact_sum(float low, float, const Unit&) { return low; }
SHARED float exact_sum(float low, float high, const WideUnit& u) {
    return FMA(16.0f, high + u.high, low + u.low);
}

// acc = fma(I, s u, acc), then fma(b', csum u, acc).
template <class S, class U>
SHARED float scale_group(float acc, float low, float high, const U& u, float scale, float bias) {
    acc = FMA(exact_sum(low, high, u), scale * u.unit, acc);
    return S::AFFINE ? FMA(bias, u.sum_unit, acc) : acc;
}

// Copies say nothing about memory to the compiler, which may move reads of other stages across them; waits
// and barriers do.
SHARED void copy_async_16(void* to, const void* from) {
    uint at = (uint)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
}
SHARED void copy_async_4(void* to, const void* from) {
    uint at = (uint)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from));
}
SHARED void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
SHARED void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A grouped matrix in device memory.
struct Packed {
    const uint* codes;
    const uchar* params;
};

#define QUARTER_STEPS 4

// Starts the copies of one slice of one tile into the warp's shared memory, in four groups of four steps;
// scales travel with the first. Always commits four groups.
template <class S>
SHARED void fetch_slice(uchar* to, const Packed& m, uint tile, uint slice, uint cols, uint lane) {
    uint all_steps = (cols + STEP - 1) / STEP, groups = cols / S::GROUP;
    uint first = slice * SLICE_STEPS, steps = min(all_steps - first, (uint)SLICE_STEPS);
    uint first_group = slice * S::SLICE_GROUPS,
         slice_groups = min(groups - first_group, (uint)S::SLICE_GROUPS);
    const uchar* codes = (const uchar*)(m.codes + ((ulong)tile * all_steps + first) * S::STEP_WORDS);
    const uchar* params = m.params + ((ulong)tile * groups + first_group) * S::GROUP_BYTES;
    for (uint at = lane * 16; at < slice_groups * S::GROUP_BYTES; at += 512)
        copy_async_16(to + S::CODE_BYTES + at, params + at);
    const uint quarter_bytes = QUARTER_STEPS * S::STEP_WORDS * 4;
    uint bytes = steps * S::STEP_WORDS * 4;
    for (uint quarter = 0; quarter < 4; quarter++) {
#pragma unroll
        for (uint i = 0; i < quarter_bytes / 512; i++) {
            uint at = quarter * quarter_bytes + i * 512 + lane * 16;
            if (at < bytes) copy_async_16(to + at, codes + at);
        }
        copy_async_commit();
    }
}

// Products of a slice: 16 outputs by NT * 8 rows. ONE: only row 0 is wanted, and rows of the operand beyond
// the last one repeat it. Values of a lane: [tile of 8 rows][output g: rows 2q, 2q+1; output g + 8: the
// same].
template <int NT, bool ONE>
struct Sums {
    float v[NT][ONE ? 2 : 4];
};

// Exact sums of a group in the making, both digits.
template <int NT>
struct Exact {
    float low[NT][4], high[NT][4];
    SHARED void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) low[n][i] = 0.0f, high[n][i] = 0.0f;
    }
};

template <class S, int NT, bool ONE>
SHARED void finish_group(Sums<NT, ONE>& sums, Exact<NT>& exact, const uchar* params,
                         const typename UnitOf<S::WIDE>::Type* units, uint group, uint lane) {
    Scales s = load_scales<S>(params, group, lane / 4);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const typename UnitOf<S::WIDE>::Type* u =
            units + group * (ONE ? 1 : NT * 8) + (ONE ? 0 : n * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < (ONE ? 2 : 4); i++) {
            const int value = ONE ? 2 * i : i, half = value / 2;
            sums.v[n][i] = scale_group<S>(sums.v[n][i], exact.low[n][value], exact.high[n][value],
                                          u[value % 2], s.scale[half], s.bias[half]);
        }
    }
    exact.clear();
}

template <class S, int T, int NT>
SHARED void multiply_unit(Exact<NT>& exact, const StepWords<S>& words, const uint4* b) {
    uint a[4];
    fragment<S, T, 0, false>(a, words);
#pragma unroll
    for (int n = 0; n < NT; n++) mma(exact.low[n], a, b[n].x, b[n].y);
    fragment<S, T, 1, false>(a, words);
#pragma unroll
    for (int n = 0; n < NT; n++) mma(exact.low[n], a, b[n].z, b[n].w);
    if (S::WIDE) {
        fragment<S, T, 0, true>(a, words);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(exact.high[n], a, b[n].x, b[n].y);
        fragment<S, T, 1, true>(a, words);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(exact.high[n], a, b[n].z, b[n].w);
    }
}

// One slice, out of the warp's shared memory as `fetch_slice` fills it. `b[n]`: the lane's row of codes in
// row tile n, at the slice's first input, shared or global memory. `units`: of the slice, [group][row] (ONE:
// [group]).
template <class S, int NT, bool ONE>
SHARED void multiply_slice(Sums<NT, ONE>& sums, const uchar* weights, uint units_32, const uchar* const* b,
                           const typename UnitOf<S::WIDE>::Type* units, uint lane) {
    const uchar* params = weights + S::CODE_BYTES;
    Exact<NT> exact;
    exact.clear();
    uint steps = (units_32 + 1) / 2;
    for (uint quarter = 0; quarter < 4; quarter++) {
        switch (quarter) {
            case 0:
                copy_async_wait<3>();
                break;
            case 1:
                copy_async_wait<2>();
                break;
            case 2:
                copy_async_wait<1>();
                break;
            default:
                copy_async_wait<0>();
        }
        __syncwarp();
        uint end = min(steps, (quarter + 1) * QUARTER_STEPS);
#pragma unroll 2
        for (uint step = quarter * QUARTER_STEPS; step < end; step++) {
            StepWords<S> words;
            load_step<S>(words, (const uint*)weights + step * S::STEP_WORDS, lane);
            uint4 x[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) x[n] = *(const uint4*)(b[n] + step * STEP * 2 + lane % 4 * 16);
            multiply_unit<S, 0, NT>(exact, words, x);
            if (S::GROUP == 32) finish_group<S, NT, ONE>(sums, exact, params, units, 2 * step, lane);
            if (S::GROUP == 32 && 2 * step + 1 == units_32) break;
#pragma unroll
            for (int n = 0; n < NT; n++) x[n] = *(const uint4*)(b[n] + step * STEP * 2 + 64 + lane % 4 * 16);
            multiply_unit<S, 1, NT>(exact, words, x);
            if (S::GROUP == 32) finish_group<S, NT, ONE>(sums, exact, params, units, 2 * step + 1, lane);
            if (S::GROUP == 64) finish_group<S, NT, ONE>(sums, exact, params, units, step, lane);
            if (S::GROUP == 128 && step % 2 == 1)
                finish_group<S, NT, ONE>(sums, exact, params, units, step / 2, lane);
        }
    }
}
