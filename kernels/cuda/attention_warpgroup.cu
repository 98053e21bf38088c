// Attention of long chains on cards whose warpgroups multiply tiles (sm_90a): heads of 256 dims, 8 or more to
// a K/V head, int8 K/V. The same bits as attention_prompt.
//
// A warpgroup has 8 rows of 8 heads: 64 rows of a product, row 8 r + h is head h of row r. Codes of queries
// (12 bits), keys, values and weights are exact as halves, and so are their sums in f32. A block of threads
// is two warpgroups that attend, each at its own pace, the second half a block behind the first at the start,
// so that one's products run beside the other's softmax; and one that brings the keys and values of the next
// blocks as halves for both. Values of the spans before lie in `out`, in the order of the threads that hold
// them, until the last one; memory itself adds a span to them while maxima stay near. Where rows are few,
// each block of threads has one span, and attention_fold joins the parts.
//
// Per block of 64 keys a multiprocessor has 2,650 issue slots of instructions (a warp that attends 1,330),
// 2,048 cycles of products and 2,860 of shared memory (products 1,540, scales 700, copies 510), and takes
// about 5,500 cycles: a warp's own chain of products, softmax and products, with one other beside it.
#include "attention_room.cuh"

#define FLOATS_32(d) FLOATS_8(d), FLOATS_8((d) + 8), FLOATS_8((d) + 16), FLOATS_8((d) + 24)
#define LIST_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// d (+)= a b over 16 inputs: the warpgroup's 64 rows of tile `a` by the 64 rows of tile `b`; d[4 j + i] is
// what mma.m16n8k16 has in d[i] for the rows 8 j to 8 j + 7 of b.
SHARED void tiles_product(float (&d)[32], const uchar* a, const uchar* b, uint k, uint add) {
#ifdef WARPGROUPS
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " LIST_32 ", %32, %33, p, 1, 1, 0, 0;\n}"
                 : FLOATS_32(d)
                 : "l"(operand(a) + 2 * k), "l"(operand(b) + 2 * k), "r"(add));
#endif
}

// The same with each warp's 16 rows of `a` in registers.
SHARED void registers_product(float (&d)[32], const uint (&a)[4], const uchar* b, uint k, uint add) {
    multiply_64(d, a, operand(b) + 2 * k, add);
}

// Larger of both, NaN if one is.
SHARED float max_or_nan(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// Which rows a warp has: rows 2 w and 2 w + 1 of its warpgroup's 8. Lane 4 n + c has head n of each.
struct Rows {
    uint at;     // the first one, in the window
    uint index;  // the first one, in the sequence
    bool wide;   // some vector is wide
};

SHARED void begin_scores(float (&d)[32], const uchar* queries, const Stage& stage, int g) {
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) tiles_product(d, queries + g * TILE, stage.keys + g * TILE, k, k > 0);
    products_commit();
}

// Takes a wide vector's sums of group g to its largest unit; `ratios` are the warpgroup's.
SHARED void take_to_largest(float (&dots)[32], const float (&ratios)[64][GROUPS], int g) {
    const uint m = threadIdx.x % GROUP_THREADS / 32 * 16 + threadIdx.x % 32 / 4;
    const float ratio[2] = {ratios[m][g], ratios[m + 8][g]};
#pragma unroll
    for (int i = 0; i < 32; i++) dots[i] = dots[i] * ratio[i / 2 % 2];
}

// The lane's scales of keys 8 j + 2 c + e, four of them: j is 2 at or 2 at + 1.
SHARED float4 scales_at(const float* scales, int at) {
    return *(const float4*)(scales + threadIdx.x % 4 * (SCALES / 4) + 4 * at);
}

// s += dots * scales
SHARED void add_scores(float (&s)[32], const float (&dots)[32], const float* scales) {
#pragma unroll
    for (int at = 0; at < 4; at++) {
        const float4 four = scales_at(scales, at);
        const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float& x = s[8 * at + i];
            x = FMA(dots[8 * at + i], of[i / 4 * 2 + i % 2], x);
        }
    }
}

// s[4 j + 2 r + e] is the score of row r and key 8 j + 2 c + e of the block. The power of two comes last:
// nothing comes near the ends of the range of f32 before.
SHARED void score_block(float (&s)[32], const Room& room, uint group, uint stage, const Rows& rows) {
    const uchar* queries = room.queries[group];
    const float* scales = room.scales[stage];
    // The other warpgroup multiplies meanwhile: a third set of dots would not fit beside what is held.
    float dots[32], sums[32];
    begin_scores(sums, queries, room.stages[stage], 0);
    begin_scores(dots, queries, room.stages[stage], 1);
    products_wait<1>();
    if (rows.wide) take_to_largest(sums, room.ratios[group], 0);
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = 0.0f;
    add_scores(s, sums, scales);
#pragma unroll
    for (int g = 1; g < GROUPS; g++) {
        if (g > 1) begin_scores(dots, queries, room.stages[stage], g);
        products_wait<0>();
        if (rows.wide) take_to_largest(dots, room.ratios[group], g);
        add_scores(s, dots, scales + g * SCALES);
    }
    const float2 factors = room.aside.factors[threadIdx.x];
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = s[i] * (i / 2 % 2 == 0 ? factors.x : factors.y);
}

// 2^x for x in [-126, 0]: exp2_exact without its bounds; the scaled result is normal.
SHARED float exp2_near(float x) {
    float shifted = x + CLARY_ROUND;
    float r = x - (shifted - CLARY_ROUND);
    return FLOAT(BITS(exp2_of_rest(r)) + (BITS(shifted) << 23));
}

// 2^x for an integer x from -126 to 127.
SHARED float power_of(float x) { return FLOAT((BITS(x + CLARY_ROUND) << 23) + 0x3f800000u); }

// The same for an integer x <= 0; +0 below -126 and for NaN.
SHARED float power_near(float x) { return x >= -126.0f ? power_of(x) : 0.0f; }

// Weight codes are halves in units of 2^-24, the step of the smallest halves: their conversion rounds as Q_11
// does.
#define WEIGHT_BITS (11 - 24)

// quantize_factor and quantize_unit of a row's weights, without branches.
struct Coding {
    float factor, unit;
};

SHARED Coding coding_of(uint magnitude) {
    const uint exponent = magnitude & 0xff800000u;
    const float none = magnitude < CLARY_MAGNITUDE_MIN_BITS ? 0.0f : CLARY_NAN;
    const bool has_codes =
        magnitude >= CLARY_MAGNITUDE_MIN_BITS && magnitude < CLARY_MAGNITUDE_MAX_BITS;
    return Coding{has_codes ? FLOAT(((uint)(WEIGHT_BITS + 253) << 23) - exponent) : 0.0f,
                  has_codes ? FLOAT(exponent + ((uint)(1 - WEIGHT_BITS) << 23)) : none};
}

// Weights p times value scales of row R in place, the row's maximum, sum and unit, and the factor to codes.
// PLAIN: all keys are seen and all p are normal.
template <int R, bool PLAIN>
SHARED Weighed weigh_row(float (&s)[32], float top, uint visible, const float* value_scales, float& factor) {
    uint c = threadIdx.x % 4, magnitude = 0;
    float lane[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float4 four = scales_at(value_scales, j / 2);
        const float of[2] = {j % 2 == 0 ? four.x : four.z, j % 2 == 0 ? four.y : four.w};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float& x = s[4 * j + 2 * R + e];
            const bool seen = PLAIN || 8 * j + 2 * c + e < visible;
            const float below = x - top;
            float p = exp2_near(below);
            // NaN stays.
            if (!PLAIN && !(below >= -126.0f)) p = below < -126.0f ? 0.0f : below;
            if (!seen) p = 0.0f;
            lane[e] = lane[e] + p;
            x = seen ? p * of[e] : 0.0f;
            // Neither is negative.
            magnitude = max(magnitude, BITS(x));
        }
    }
#pragma unroll
    for (int h = 2; h > 0; h >>= 1)
#pragma unroll
        for (int e = 0; e < 2; e++) lane[e] = lane[e] + __shfl_xor_sync(ALL_LANES, lane[e], h);
    const Coding coding = coding_of(quad_max(magnitude));
    factor = coding.factor;
    return Weighed{top, lane[0] + lane[1], coding.unit};
}

// Codes of row R's weights as left operands: step k has the keys 16 k to 16 k + 15.
template <int R>
SHARED void code_weights(uint (&w)[4][4], const float (&s)[32], float factor) {
#pragma unroll
    for (int j = 0; j < 8; j++)
        w[j / 2][R + 2 * (j % 2)] = half_pair(s[4 * j + 2 * R] * factor, s[4 * j + 2 * R + 1] * factor);
}

// The largest score of row R that is seen, of the whole quad, NaN left out.
template <int R>
SHARED float top_seen(const float (&s)[32], uint visible) {
    uint c = threadIdx.x % 4;
    float top = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float x = s[4 * (i / 2) + 2 * R + i % 2];
        if (8 * (i / 2) + 2 * c + i % 2 < visible) top = x > top ? x : top;
    }
#pragma unroll
    for (int h = 1; h <= 2; h++) {
        float other = __shfl_xor_sync(ALL_LANES, top, h);
        top = other > top ? other : top;
    }
    return ceilf(top);
}

// The largest score of row R of the whole quad, NaN if one is; `plain` becomes false if some p may be 0 or no
// number.
template <int R>
SHARED float top_of(const float (&s)[32], bool& plain) {
    float top = s[2 * R];
    uint bits = BITS(s[2 * R]);
#pragma unroll
    for (int i = 1; i < 16; i++) {
        float x = s[4 * (i / 2) + 2 * R + i % 2];
        top = max_or_nan(top, x);
        bits = max(bits, BITS(x));
    }
#pragma unroll
    for (int h = 1; h <= 2; h++) top = max_or_nan(top, __shfl_xor_sync(ALL_LANES, top, h));
    top = ceilf(top);
    // The largest bits are those of the lowest negative score. Without one the lowest is taken to be 0. False
    // for NaN and infinities too.
    float low = (int)bits < 0 ? FLOAT(bits) : 0.0f;
    plain = plain && top - low <= 126.0f;
    return top;
}

// Scores of both rows to weight codes.
SHARED void weigh_rows(Weighed (&part)[2], uint (&w)[4][4], float (&s)[32], const uint (&visible)[2],
                       const float* value_scales) {
    bool plain = visible[0] == KEYS && visible[1] == KEYS;
    float top[2] = {top_of<0>(s, plain), top_of<1>(s, plain)}, factor[2];
    if (!__any_sync(ALL_LANES, !plain)) {
        part[0] = weigh_row<0, true>(s, top[0], KEYS, value_scales, factor[0]);
        part[1] = weigh_row<1, true>(s, top[1], KEYS, value_scales, factor[1]);
    } else {
        part[0] = weigh_row<0, false>(s, top_seen<0>(s, visible[0]), visible[0], value_scales, factor[0]);
        part[1] = weigh_row<1, false>(s, top_seen<1>(s, visible[1]), visible[1], value_scales, factor[1]);
        // A group without codes may hold infinities and NaN.
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (factor[i / 2 % 2] == 0.0f) s[i] = 0.0f;
    }
    code_weights<0>(w, s, factor[0]);
    code_weights<1>(w, s, factor[1]);
}

// The softmax of a row's span. What is held of its values is theirs times 2^(max - reference): it is rescaled
// only where maxima lie far apart. Elsewhere the bits are the same, for nothing is below 2^-126 but zeros:
// weights have units of 2^-50 and more.
struct Span {
    float max, sum, reference;

    // Takes what is held to the values.
    SHARED float to_values() const { return max == reference ? 1.0f : power_of(reference - max); }
};

SHARED Span span_at(const float4& place) { return Span{place.x, place.y, place.z}; }

// Most that a maximum lies from the reference. Also the least power of two of f32 is 2^-149 = 2^(-126 - 23).
#define NEAR 23.0f

// How a block's dots join what a row of the span holds: held = dots * first * second + held * of_held, where
// the products of powers of two are exact. `first` is 1 unless their product would not be.
struct Joining {
    float of_held, first, second;
};

// Takes a block of row R into its span, which is new if it STARTS: then zeros are held.
template <int R>
SHARED Joining join_of(Aside& aside, const Weighed& part, bool starts) {
    float4& place = aside.spans[R][threadIdx.x];
    if (starts) {
        place = make_float4(part.max, part.sum, part.max, 0.0f);
        return Joining{1.0f, 1.0f, part.unit};
    }
    const Span span = span_at(place);
    const float both = part.max > span.max ? part.max : span.max;
    const float of_part = power_near(part.max - both), of_span = power_near(span.max - both);
    const float sum = FMA(part.sum, of_part, span.sum * of_span), apart = part.max - span.reference;
    const bool is_near = apart >= -NEAR && apart <= NEAR;
    place = make_float4(both, sum, is_near ? span.reference : both, 0.0f);
    if (is_near) return Joining{1.0f, 1.0f, part.unit * power_of(apart)};
    // Least factor that is exact with any unit.
    const bool tiny = of_part < FLOAT((127 - 70) << 23);
    return Joining{span.to_values() * of_span, tiny ? part.unit : 1.0f, tiny ? of_part : part.unit * of_part};
}

SHARED void begin_values(float (&d)[32], const uint (&w)[4][4], const Stage& stage, int part) {
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) registers_product(d, w[k], stage.values + part * TILE, k, k > 0);
    products_commit();
}

// held += dots * second, or dots * first * second where maxima lie FAR apart. Products of the first group of
// dims into dots[0] are on their way.
template <bool FAR>
SHARED void fold_dots(float (&held)[GROUPS][32], float (&dots)[2][32], const float (&second)[2],
                      const float2& first, const uint (&w)[4][4], const Stage& stage) {
#pragma unroll
    for (int d = 0; d < GROUPS; d++) {
        float(&now)[32] = dots[d % 2];
        if (d + 1 < GROUPS) {
            begin_values(dots[(d + 1) % 2], w, stage, d + 1);
            products_wait<1>();
        } else {
            products_wait<0>();
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (FAR) now[i] = now[i] * (i / 2 % 2 == 0 ? first.x : first.y);
            held[d][i] = FMA(now[i], second[i / 2 % 2], held[d][i]);
        }
    }
}

// Values of a block into those of the span.
SHARED void fold_block(float (&held)[GROUPS][32], Aside& aside, const Weighed (&part)[2], bool starts,
                       const uint (&w)[4][4], const Stage& stage) {
    float dots[2][32];
    begin_values(dots[0], w, stage, 0);
    // Meanwhile:
    const Joining joining[2] = {join_of<0>(aside, part[0], starts), join_of<1>(aside, part[1], starts)};
    const float second[2] = {joining[0].second, joining[1].second};
    const float2 first = make_float2(joining[0].first, joining[1].first);
    // `first` is 1 where nothing is rescaled.
    const bool near = joining[0].of_held == 1.0f && first.x == 1.0f && joining[1].of_held == 1.0f &&
                      first.y == 1.0f;
    if (__any_sync(ALL_LANES, !near)) {
#pragma unroll
        for (int i = 0; i < GROUPS * 32; i++)
            held[i / 32][i % 32] = held[i / 32][i % 32] * joining[i / 2 % 2].of_held;
        fold_dots<true>(held, dots, second, first, w, stage);
    } else {
        fold_dots<false>(held, dots, second, first, w, stage);
    }
}

// Writes row R of what is held to the lane's vector at `to`.
template <int R>
SHARED void store_row(float2* to, const float (&held)[GROUPS][32]) {
    to += threadIdx.x % 4;
#pragma unroll
    for (int d = 0; d < GROUPS; d++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            to[32 * d + 4 * j] = make_float2(held[d][4 * j + 2 * R], held[d][4 * j + 2 * R + 1]);
}

// How a span joins those before, which lie in memory: theirs * of_before + held * of_held.
struct SpanJoining {
    float of_before, of_held;
    bool first, is_near;  // near: of_before is 1
};

// Before the last span memory keeps its base while maxima lie near it: nothing has to be read.
SHARED SpanJoining join_spans(Fold& whole, float& base, const Span& span, bool last) {
    const float before = whole.max;
    const Factors factors = admit(whole, span.max, span.sum);
    // The first is taken as it is, zeros with their sign: fma(held, of_held, -0).
    if (factors.first) {
        base = span.max;
        return SpanJoining{1.0f, span.to_values(), true, false};
    }
    const float low = span.max < before ? span.max : before, apart = span.reference - base;
    if (!last && low - base >= -NEAR && whole.max - base <= NEAR && apart >= -2.0f * NEAR &&
        apart <= 2.0f * NEAR)
        return SpanJoining{1.0f, power_of(apart), false, true};
    const SpanJoining joining = {factors.of_held * (before == base ? 1.0f : power_of(base - before)),
                                 factors.of_part * span.to_values(), false, false};
    base = whole.max;
    return joining;
}

// at += x, in memory.
SHARED void add_to_memory(float4* at, float4 x) {
#ifdef WARPGROUPS
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
#endif
}

// Joins what is held of row R, the groups of dims 2 half and 2 half + 1, with what lies at `own`: fours of
// values, of which a lane has one every 32.
template <int R>
SHARED void fold_fours(float (&held)[GROUPS][32], const float4* own, const SpanJoining& joining, int half) {
    // These loads are in flight together.
    float4 before[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        before[i] =
            joining.first ? make_float4(-0.0f, -0.0f, -0.0f, -0.0f) : __ldcg(own + 32 * (8 * half + i));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float of[4] = {before[i].x, before[i].y, before[i].z, before[i].w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float& x = held[2 * half + i / 4][8 * (i % 4) + 2 * R + e / 2 * 4 + e % 2];
            x = FMA(x, joining.of_held, of[e] * joining.of_before);
        }
    }
}

// Takes a span of row R into what lies in the row's 8 vectors from `out` on. LAST: divides by the sum;
// before, that memory has each lane's values in fours, lanes side by side.
template <int R>
SHARED void fold_span(float4* out, Fold& whole, float& base, float (&held)[GROUPS][32], const Span& span,
                      bool last) {
    const SpanJoining joining = join_spans(whole, base, span, last);
    float4* own = out + threadIdx.x % 32;
    if (!__any_sync(ALL_LANES, !joining.is_near)) {
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; i++) {
            const float* x = held[i / 4] + 8 * (i % 4) + 2 * R;
            const float of = joining.of_held;
            add_to_memory(own + 32 * i, make_float4(x[0] * of, x[1] * of, x[4] * of, x[5] * of));
        }
        return;
    }
#pragma unroll
    for (int half = 0; half < GROUPS / 2; half++) fold_fours<R>(held, own, joining, half);
    if (last) {
        const float inverse = DIVIDE(1.0f, whole.sum);
#pragma unroll
        for (int i = 0; i < 16 * GROUPS; i++) {
            float& x = held[i / 16][i / 2 % 8 * 4 + 2 * R + i % 2];
            x = x * inverse;
        }
        // Nobody overwrites what another lane has yet to read.
        __syncwarp();
        store_row<R>((float2*)out + threadIdx.x % 32 / 4 * (32 * GROUPS), held);
    } else {
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; i++) {
            const float* x = held[i / 4] + 8 * (i % 4) + 2 * R;
            own[32 * i] = make_float4(x[0], x[1], x[4], x[5]);
        }
    }
}

// Writes a span of row R as a part.
template <int R>
SHARED void store_part(const Partial& partial, ulong part, float (&held)[GROUPS][32], const Span& span) {
    const float to_values = span.to_values();
#pragma unroll
    for (int i = 0; i < 16 * GROUPS; i++) {
        float& x = held[i / 16][i / 2 % 8 * 4 + 2 * R + i % 2];
        x = x * to_values;
    }
    store_row<R>((float2*)(partial.values + part * (64 * GROUPS)), held);
    if (threadIdx.x % 4 == 0) *(float2*)(partial.folds + 2 * part) = make_float2(span.max, span.sum);
}

// Writes what a thread that attends knows of its rows aside.
SHARED Rows rows_of(Aside& aside, const StepWindow& window, const AttentionShape& shape,
                    const Queries& queries, uint head, uint first) {
    Rows rows;
    rows.at = first + __shfl_sync(ALL_LANES, threadIdx.x / 32, 0) * 2;
    rows.index = window.start + rows.at;
    bool wide = false;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint row = window.first + min(rows.at + r, window.rows - 1);
        Units units = units_of(queries, row * shape.heads + head + threadIdx.x % 32 / 4);
        wide = wide || units.wide;
        // A fault's dots are 0.
        factor[r] = units.largest * shape.scale;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            if (units.of[g] != units.of[g]) factor[r] = CLARY_NAN;
    }
    rows.wide = __any_sync(ALL_LANES, wide);
    aside.factors[threadIdx.x] = make_float2(factor[0], factor[1]);
    return rows;
}

// What row R holds at the end of a span: to `out`, or as a part where each block of threads has one span
// (APART).
template <int R>
SHARED void end_span(Aside& aside, const AttentionShape& shape, const Partial& partial,
                     float (&held)[GROUPS][32], bool apart, bool is_first, bool last) {
    const Span span = span_at(aside.spans[R][threadIdx.x]);
    if (apart) {
        store_part<R>(partial, aside.part[threadIdx.x] + R * shape.heads * shape.spans, held, span);
    } else {
        float2& place = aside.wholes[R][threadIdx.x];
        Fold whole = {place.x, place.y, !is_first};
        fold_span<R>(aside.out[threadIdx.x] + R * shape.heads * (16 * GROUPS), whole,
                     aside.bases[R][threadIdx.x], held, span, last);
        place = make_float2(whole.max, whole.sum);
    }
#pragma unroll
    for (int i = 0; i < 16 * GROUPS; i++) held[i / 16][i / 2 % 8 * 4 + 2 * R + i % 2] = 0.0f;
}

// The first two warpgroups: their rows over blocks `begin` to `blocks` - 1.
SHARED void attend(Room& room, uint group, const Rows& rows, uint row_count, int begin, int blocks,
                   const AttentionShape& shape, const Partial& partial) {
    float held[GROUPS][32] = {};
    // Blocks in which the rows end; a row that is not there walks with the others and is not written.
    const int last[2] = {rows.at < row_count ? (int)(rows.index / KEYS) : -1,
                         rows.at + 1 < row_count ? (int)((rows.index + 1) / KEYS) : -1};
    Turn turn = {0, 0};
    barrier_wait(room.queries_full + group, 0);
    if (group == 1) barrier_wait(&room.scored, 0);
#pragma unroll 1
    for (int block = begin; block < blocks; block++, turn.next()) {
        const uint stage = turn.stage;
        const uint visible[2] = {keys_seen(rows.index, block), keys_seen(rows.index + 1, block)};
        float s[32];
        uint w[4][4];
        Weighed weighed[2];
        barrier_wait(room.keys_full + stage, turn.parity);
        score_block(s, room, group, stage, rows);
        if (group == 0 && block == begin) arrive(&room.scored);
        arrive(room.keys_empty + stage);
        barrier_wait(room.values_full + stage, turn.parity);
        weigh_rows(weighed, w, s, visible, room.scales[stage] + GROUPS * SCALES);
        const bool starts = block % SPAN_BLOCKS == 0, ends = block % SPAN_BLOCKS == SPAN_BLOCKS - 1;
        fold_block(held, room.aside, weighed, starts, w, room.stages[stage]);
        arrive(room.values_empty + stage);
        const bool is_first = block < SPAN_BLOCKS;
        auto apart = [&](uint r) { return shape.spans > 0 && rows.index + r >= SPAN_BLOCKS * KEYS; };
        if (block <= last[0] && (ends || block == last[0]))
            end_span<0>(room.aside, shape, partial, held, apart(0), is_first, block == last[0]);
        if (block <= last[1] && (ends || block == last[1]))
            end_span<1>(room.aside, shape, partial, held, apart(1), is_first, block == last[1]);
    }
}

// Registers of a thread that fills stages, and of one that attends: together what a block of threads may
// have.
#define FILL_REGISTERS 56
#define ATTEND_REGISTERS 224

// Grid [row tiles of 16, tiles of 8 heads (by span, where shape.spans says that spans are apart), windows],
// 384 threads, room for a Room.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_warpgroup(StepTables step, KvPool pool, AttentionShape shape, Queries queries, float* out,
                        Partial partial, Halves halves) {
#ifdef WARPGROUPS
    extern __shared__ __align__(1024) uchar memory[];
    Room& room = *(Room*)memory;
    const uint group = warpgroup();
    begin_barriers(room);
    // A long launch: the waiting blocks of the next would take from its own.
    wait_for_launches_before();
    const StepWindow window = step.windows[blockIdx.z];
    // The longest first.
    const uint first = (gridDim.x - 1 - blockIdx.x) * TILE_ROWS;
    if (is_small(window) || first >= window.rows) return;
    const uint tiles = tiles_of(shape, pool), span = blockIdx.y / tiles;
    const Vectors vectors = vectors_of(shape, pool, blockIdx.y % tiles);
    int blocks = (window.start + min(first + TILE_ROWS, window.rows) - 1) / KEYS + 1;
    const int begin = span * SPAN_BLOCKS;
    if (begin >= blocks) return;
    if (shape.spans > 0) blocks = min(blocks, begin + SPAN_BLOCKS);
    __syncthreads();
    if (group == FILL_GROUP) {
        fewer_registers<FILL_REGISTERS>();
        if (!HALVES)
            fill_stages(
                room, begin, blocks,
                [&](int block) { return page_of(step, window, (uint)block * KEYS); },
                [&](uint page) { return kv_block(pool, page, vectors.kv_head); });
        else if (threadIdx.x / 32 == FILL_GROUP * GROUP_THREADS / 32)
            copy_stages(room, begin, blocks, halves.of_head(pool, blockIdx.z, vectors.kv_head));
    } else {
        more_registers<ATTEND_REGISTERS>();
        const Rows rows = rows_of(room.aside, window, shape, queries, vectors.head, first);
        const uint head_at = vectors.head + threadIdx.x % 32 / 4;
        room.aside.part[threadIdx.x] = part_at(shape, blockIdx.z * shape.rows_max + rows.at, head_at, span);
        room.aside.out[threadIdx.x] =
            (float4*)out + ((ulong)(window.first + rows.at) * shape.heads + vectors.head) * (16 * GROUPS);
        load_queries(room, group, window, queries, shape.heads, vectors.head, first);
        attend(room, group, rows, window.rows, begin, blocks, shape, partial);
    }
#endif
}
