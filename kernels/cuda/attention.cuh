// Attention over integer K/V with matrix instructions (crates/device/src/cpu/attention.rs,
// attention_block.rs).
//
// A warp works on 8 query vectors (heads of one row) and a block of 64 keys. Query codes have 12 bits: two
// signed digits, code = 256 high + low, are the rows 0..7 and 8..15 of the left operand of m16n8k32, so that
// the lane that gets a dot of the high digits gets that of the low ones too. Lane 4 n + c has vector n and
// the keys 8 t + 2 c + e, e = 0, 1: all keys of two of the eight lanes of the sum over p. The value weights
// it makes of them are its part of the left operand of the second product, V's storage order makes the right
// one.
#pragma once
#include "kv.cuh"

// Groups of 64 head dims, and digits of K/V codes: constants of the compilation.
#ifndef GROUPS
#define GROUPS 4
#endif
#ifndef DIGITS
#define DIGITS 1
#endif

#define ALL_LANES 0xffffffffu
#define SPAN_BLOCKS 8
#define NEGATIVE_INFINITY FLOAT(0xff800000u)
// Bytes of one digit plane.
#define PLANE (GROUPS * KEYS * 64)

SHARED void multiply_add_8bit(int (&acc)[4], const uint (&a)[4], uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Digits of four codes, as bytes in order.
SHARED void pack_digits(const int (&code)[4], uint& high, uint& low) {
    uint h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        schar digit = (schar)code[i];
        l[i] = (uint)code[i] & 0xffu;
        h[i] = (uint)((code[i] - digit) >> 8) & 0xffu;
    }
    high = h[0] | h[1] << 8 | h[2] << 16 | h[3] << 24;
    low = l[0] | l[1] << 8 | l[2] << 16 | l[3] << 24;
}

SHARED uint quad_max(uint x) {
    x = max(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return max(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// Query digits of a step (rope.cu): signed bytes [rows, heads, GROUPS, high and low, 64], units [rows, heads,
// GROUPS].
struct Queries {
    const schar* digits;
    const float* units;
};

// Eight query vectors as left operands: dims 16 c + 8 j + 0..7 of group g.
struct Query {
    uint a[GROUPS][2][4];
    float unit[GROUPS];
};

// Vector `at` of the step (row * heads + head) as vector n of the lane.
SHARED void load_query(Query& query, const Queries& from, ulong at) {
    uint c = threadIdx.x % 4;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const uint4* digits = (const uint4*)(from.digits + (at * GROUPS + g) * 128 + c * 16);
        uint4 high = digits[0], low = digits[4];
        query.a[g][0][0] = high.x, query.a[g][0][1] = low.x, query.a[g][0][2] = high.y,
        query.a[g][0][3] = low.y;
        query.a[g][1][0] = high.z, query.a[g][1][1] = low.z, query.a[g][1][2] = high.w,
        query.a[g][1][3] = low.w;
        query.unit[g] = from.units[at * GROUPS + g];
    }
}

// Dot of two digit sums: 256 high + low of the query's digits.
SHARED int joined(int high, int low) { return 256 * high + low; }

// The scores of keys 8 t + 2 c + e, adding group g: `k` is what keys 8 t + n have at dims 16 c of the group,
// one vector of 16 bytes per digit; `scale` what the lane's two keys have.
SHARED void score_group(float (&score)[2], const Query& query, int g, const uint4 (&k)[DIGITS],
                        float2 scale) {
    float dot[DIGITS][2];
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++) {
        int acc[4] = {0, 0, 0, 0};
        multiply_add_8bit(acc, query.a[g][0], k[digit].x, k[digit].y);
        multiply_add_8bit(acc, query.a[g][1], k[digit].z, k[digit].w);
        dot[digit][0] = __int2float_rn(joined(acc[0], acc[2]));
        dot[digit][1] = __int2float_rn(joined(acc[1], acc[3]));
    }
    const float scales[2] = {scale.x, scale.y};
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float i = DIGITS == 1 ? dot[0][e] : FMA(256.0f, dot[0][e], dot[DIGITS - 1][e]);
        score[e] = FMA(i, scales[e] * query.unit[g], score[e]);
    }
}

// A block's part of a softmax: for vector n of the lane.
struct Weighed {
    float max, sum, unit;
};

// Softmax weights of the first `visible` keys times the value scales, as left operands of the second product.
// scores[2 t + e] is that of key 8 t + 2 c + e; value_scales(t) gives the scales of the lane's two keys.
template <class Scales>
SHARED Weighed weigh(float (&s)[16], float scale, uint visible, const Scales& value_scales, uint (&w)[2][4]) {
    uint c = threadIdx.x % 4;
    float top = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint key = 8 * (i / 2) + 2 * c + i % 2;
        s[i] = key < visible ? s[i] * scale : NEGATIVE_INFINITY;
        top = s[i] > top ? s[i] : top;
    }
#pragma unroll
    for (int h = 1; h <= 2; h++) {
        float other = __shfl_xor_sync(ALL_LANES, top, h);
        top = other > top ? other : top;
    }
    Weighed part;
    part.max = ceilf(top);
    float lane[2] = {0.0f, 0.0f};
    uint magnitude = 0;
#pragma unroll
    for (int t = 0; t < 8; t++) {
        float2 scales = value_scales(t);
        const float of[2] = {scales.x, scales.y};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            bool seen = 8 * t + 2 * c + e < visible;
            float p = seen ? exp2_exact(s[2 * t + e] - part.max) : 0.0f;
            lane[e] = lane[e] + p;
            s[2 * t + e] = seen ? p * of[e] : 0.0f;
            magnitude = max(magnitude, BITS(s[2 * t + e]) & 0x7fffffffu);
        }
    }
    // lane[i] += lane[i + 4], + 2: lanes 2 c and 2 c + 1 are here; then + 1.
#pragma unroll
    for (int h = 2; h > 0; h >>= 1)
#pragma unroll
        for (int e = 0; e < 2; e++) lane[e] = lane[e] + __shfl_xor_sync(ALL_LANES, lane[e], h);
    part.sum = lane[0] + lane[1];
    magnitude = quad_max(magnitude);
    part.unit = quantize_unit(11, magnitude);
    float factor = quantize_factor(11, magnitude);
#pragma unroll
    for (int four = 0; four < 4; four++) {
        int code[4];
#pragma unroll
        for (int i = 0; i < 4; i++) code[i] = factor == 0.0f ? 0 : __float2int_rn(s[4 * four + i] * factor);
        pack_digits(code, w[four / 2][four % 2 * 2], w[four / 2][four % 2 * 2 + 1]);
    }
    return part;
}

// I of dims 8 d + 2 c + e, e = 0, 1, of vector n: `v` is what dim 8 d + n has, keys in the order of
// value_slot.
SHARED void value_dots(float (&dot)[2], const uint (&w)[2][4], const uint4 (&v)[DIGITS]) {
    float part[DIGITS][2];
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++) {
        int acc[4] = {0, 0, 0, 0};
        multiply_add_8bit(acc, w[0], v[digit].x, v[digit].y);
        multiply_add_8bit(acc, w[1], v[digit].z, v[digit].w);
        part[digit][0] = __int2float_rn(joined(acc[0], acc[2]));
        part[digit][1] = __int2float_rn(joined(acc[1], acc[3]));
    }
#pragma unroll
    for (int e = 0; e < 2; e++)
        dot[e] = DIGITS == 1 ? part[0][e] : FMA(256.0f, part[0][e], part[DIGITS - 1][e]);
}

// A running softmax of one vector, without its values.
struct Fold {
    float max, sum;
    bool seen;
};

struct Factors {
    float of_part, of_held;
    bool first;
};

// Takes in maximum and sum of a later part; gives the factors of its values and of those held.
SHARED Factors admit(Fold& fold, float max, float sum) {
    if (!fold.seen) {
        fold = Fold{max, sum, true};
        return Factors{0.0f, 0.0f, true};
    }
    // A NaN score leaves a maximum of the others, but its sum is NaN.
    float both = max > fold.max ? max : fold.max;
    Factors factors{exp2_exact(max - both), exp2_exact(fold.max - both), false};
    fold.sum = FMA(sum, factors.of_part, fold.sum * factors.of_held);
    fold.max = both;
    return factors;
}

SHARED float folded(const Factors& factors, float held, float part) {
    return factors.first ? part : FMA(part, factors.of_part, held * factors.of_held);
}

struct AttentionShape {
    uint heads;     // query heads
    uint spans;     // spans there is room for, per row and head
    uint rows_max;  // rows of a window that attention_spans takes in this launch
    float scale;    // the f32 nearest to log2(e)/sqrt(head_dim)
    uint first_row, first_window;  // of this launch
    uint long_chains;              // 1: the parts that attention_fold joins are those of long chains
    uint pad;
};

// Parts of spans: values [rows, heads, spans, 64 GROUPS], then maxima and sums [.., 2].
struct Partial {
    float* values;
    float* folds;
};

// Place of a span's part; `row` counts rows_max per window.
SHARED ulong part_at(const AttentionShape& shape, uint row, uint head, uint span) {
    return ((ulong)row * shape.heads + head) * shape.spans + span;
}

// Longer chains are attention_prompt's.
#define SMALL_ROWS 16

SHARED bool is_small(const StepWindow& window) { return window.rows <= SMALL_ROWS || window.tree; }

// Which vectors a block of threads has: 8 query heads of one K/V head.
struct Vectors {
    uint kv_head;
    uint head;   // the first one
    uint count;  // of 8
};

// `at` counts tiles of 8 heads of each K/V head.
SHARED Vectors vectors_of(const AttentionShape& shape, const KvPool& pool, uint at) {
    uint group = shape.heads / pool.kv_heads, tiles = (group + 7) / 8;
    uint kv_head = at / tiles, first = at % tiles * 8;
    return Vectors{kv_head, kv_head * group + first, min(8u, group - first)};
}

SHARED uint tiles_of(const AttentionShape& shape, const KvPool& pool) {
    return (shape.heads / pool.kv_heads + 7) / 8 * pool.kv_heads;
}

// Keys of a block that a row at `index` sees.
SHARED uint keys_seen(uint index, uint block) {
    return index < block * KEYS ? 0 : min((uint)KEYS, index + 1 - block * KEYS);
}

SHARED void copy_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}

SHARED void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LATER groups of copies are unfinished.
template <int LATER>
SHARED void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
