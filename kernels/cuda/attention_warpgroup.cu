// Attention of long chains on cards whose warpgroups multiply tiles (sm_90a): heads of 256 dims, 8 or more to
// a K/V head, int8 K/V. The same bits as attention_prompt.
//
// A warpgroup has 8 rows of 8 heads: 64 rows of a product, row 8 r + h is head h of row r. Codes of queries
// (12 bits), keys, values and weights are exact as halves, and so are their sums in f32. A block of threads
// is two warpgroups; the first turns the keys of the next block into halves, the second the values, while the
// other multiplies. Values of the spans before lie in `out`, in the order of the threads that hold them, until
// the last one. Where rows are few, each block of threads has one span, and attention_fold joins the parts.
//
// Bound by the float work of a score (about 30 operations, 0.25 cycles of a multiprocessor) and by its
// products (0.25 cycles).
#include "attention.cuh"
#include "warpgroup.cuh"

#define THREADS 256
#define GROUP_THREADS 128
#define TILE_ROWS 16
// 64 rows of 64 halves.
#define TILE 8192
// Pieces of 16 codes of K or V that a thread turns into halves.
#define PIECES (GROUPS * KEYS * 4 / GROUP_THREADS)

struct Halves {
    uchar keys[GROUPS * TILE];    // [group][key][64 dims]
    uchar values[GROUPS * TILE];  // [dim][64 keys]
};

struct Room {
    uchar queries[2][GROUPS * TILE];  // [group][8 r + h][64 dims], by warpgroup
    Halves stages[2];
    uint4 ahead[2][PIECES][GROUP_THREADS];  // codes as they lie in memory, by the thread that copied them
    float scales[2][(GROUPS + 1) * KEYS];
};

// Where the 16-byte chunk `chunk` of a row of 64 halves lies: products read tiles in this order.
SHARED uint chunk_at(uint row, uint chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

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

SHARED uint pick_bytes(uint a, uint b, uint selector) {
    uint d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

SHARED uint half_pair_minus(uint a, uint b) {
    uint d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Larger of both, NaN if one is.
SHARED float max_or_nan(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// Four signed bytes as two pairs of halves: 1024 + 128 + code is put together from bits, then 1152 taken off.
SHARED uint2 halves_of(uint codes) {
    uint lifted = codes ^ 0x80808080u;
    return make_uint2(half_pair_minus(pick_bytes(lifted, 0x64646464u, 0x4140), 0x64806480u),
                      half_pair_minus(pick_bytes(lifted, 0x64646464u, 0x4342), 0x64806480u));
}

// Which rows and heads a thread has: rows 2 w and 2 w + 1 of its warpgroup's 8, head n of each.
struct Rows {
    uint at[2];     // in the window
    uint index[2];  // in the sequence
    uint home[2];   // of the row's 8 vectors in `out`, in fours of values
    float factor[2];  // to scores: the vector's largest unit times the scale of the softmax; NaN after a fault
    bool wide;        // some vector of the warp is wide
};

// The same in all lanes of a warp, and the compiler knows it.
SHARED uint warpgroup() { return __shfl_sync(ALL_LANES, threadIdx.x / GROUP_THREADS, 0); }

// Halves hold codes of a vector in its largest unit: codes of a smaller one are multiplied by the ratio of the
// units, which leaves them normal down to this one. A vector whose units lie further apart is wide: it keeps
// its codes, and its sums are multiplied.
#define RATIO_MIN FLOAT((127 - 14) << 23)

// Units of a vector: powers of two, 0 for a group without codes, NaN for a fault.
struct Units {
    float of[GROUPS];
    float largest;
    bool wide;

    // Ratio of group g to the largest; 1 where there are no codes.
    SHARED float ratio(uint g) const {
        return of[g] > 0.0f ? FLOAT(BITS(of[g]) - BITS(largest) + BITS(1.0f)) : 1.0f;
    }
};

SHARED Units units_of(const Queries& queries, ulong vector) {
    Units units;
    units.largest = 0.0f;
    units.wide = false;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        units.of[g] = queries.units[vector * GROUPS + g];
        units.largest = units.of[g] > units.largest ? units.of[g] : units.largest;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) units.wide = units.wide || units.ratio(g) < RATIO_MIN;
    return units;
}

// Query codes of a warpgroup as halves.
SHARED void load_queries(Room& room, uint group_at, const StepWindow& window, const Queries& queries, uint heads,
                         uint head, uint first) {
    uint thread = threadIdx.x % GROUP_THREADS;
    uchar* to = room.queries[group_at];
#pragma unroll 1
    for (uint piece = thread; piece < 64 * GROUPS * 4; piece += GROUP_THREADS) {
        uint group = piece / 256, m = piece / 4 % 64, quad = piece % 4;
        uint row = window.first + min(first + 8 * group_at + m / 8, window.rows - 1);
        ulong vector = (ulong)row * heads + head + m % 8;
        const uint4* digits = (const uint4*)(queries.digits + (vector * GROUPS + group) * 128 + quad * 16);
        uint4 high = digits[0], low = digits[4];
        Units units = units_of(queries, vector);
        float ratio = 1.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            if (g == group && !units.wide) ratio = units.ratio(g);
        const uint highs[4] = {high.x, high.y, high.z, high.w}, lows[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++) {
            uint halves[4];
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                float code[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int byte = 8 * (2 * (pair % 2) + e), word = 2 * chunk + pair / 2;
                    code[e] = __int2float_rn(256 * (schar)(highs[word] >> byte) + (schar)(lows[word] >> byte));
                }
                halves[pair] = half_pair(code[0] * ratio, code[1] * ratio);
            }
            *(uint4*)(to + group * TILE + chunk_at(m, 2 * quad + chunk)) =
                make_uint4(halves[0], halves[1], halves[2], halves[3]);
        }
    }
}

// Queues the copy of K (first warpgroup) or V (second) of a block.
SHARED void copy_ahead(Room& room, uint group, const KvBlock& from) {
    uint thread = threadIdx.x % GROUP_THREADS;
    const schar* codes = from.codes + group * PLANE;
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        copy_async_16(&room.ahead[group][i][thread], codes + (i * GROUP_THREADS + thread) * 16);
}

SHARED void copy_scales(float* to, const KvBlock& from) {
    uint i = threadIdx.x * 4;
    if (i < (GROUPS + 1) * KEYS) copy_async_16(to + i, from.scales + i);
}

// What copy_ahead brought, as halves.
SHARED void make_halves(Halves& to, const Room& room, uint group) {
    uint thread = threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        uint4 codes = room.ahead[group][i][thread];
        uint row = (i * GROUP_THREADS + thread) / 4, c = thread % 4;
        uint2 x = halves_of(codes.x), y = halves_of(codes.y), z = halves_of(codes.z), w = halves_of(codes.w);
        if (group == 0) {
            *(uint4*)(to.keys + chunk_at(row, 2 * c)) = make_uint4(x.x, x.y, y.x, y.y);
            *(uint4*)(to.keys + chunk_at(row, 2 * c + 1)) = make_uint4(z.x, z.y, w.x, w.y);
        } else {
            // Pair j is what keys 8 j + 2 c and the next have.
            const uint pairs[8] = {x.x, x.y, y.x, y.y, z.x, z.y, w.x, w.y};
#pragma unroll
            for (int j = 0; j < 8; j++) *(uint*)(to.values + chunk_at(row, j) + 4 * c) = pairs[j];
        }
    }
}

SHARED void begin_scores(float (&d)[32], const uchar* queries, const Halves& stage, int g) {
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) tiles_product(d, queries + g * TILE, stage.keys + g * TILE, k, k > 0);
    products_commit();
}

// Takes a wide vector's sums of group g to its largest unit.
SHARED void take_to_largest(float (&dots)[32], const Rows& rows, const Queries& queries, int g) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        Units units = units_of(queries, rows.home[r] / (16 * GROUPS) + threadIdx.x % 32 / 4);
        float ratio = units.wide ? units.ratio(g) : 1.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float& x = dots[i / 2 * 4 + 2 * r + i % 2];
            x = x * ratio;
        }
    }
}

SHARED void add_scores(float (&s)[32], const float (&dots)[32], const float* scales, int g) {
    uint c = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 scale = *(const float2*)(scales + g * KEYS + 8 * j + 2 * c);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            s[4 * j + 2 * r] = FMA(dots[4 * j + 2 * r], scale.x, s[4 * j + 2 * r]);
            s[4 * j + 2 * r + 1] = FMA(dots[4 * j + 2 * r + 1], scale.y, s[4 * j + 2 * r + 1]);
        }
    }
}

// s[4 j + 2 r + e] is the score of row r and key 8 j + 2 c + e of the block. The power of two comes last:
// nothing comes near the ends of the range of f32 before.
SHARED void score_block(float (&s)[32], const uchar* queries, const Halves& stage, const Rows& rows,
                        const Queries& of, const float* scales) {
    // The other warpgroup multiplies meanwhile: a second set of dots would not fit beside what is held.
    float dots[32];
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        begin_scores(dots, queries, stage, g);
        products_wait<0>();
        if (rows.wide) take_to_largest(dots, rows, of, g);
        add_scores(s, dots, scales, g);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = s[i] * rows.factor[i / 2 % 2];
}

// 2^x for x in [-126, 0]: exp2_exact without its bounds; the scaled result is normal.
SHARED float exp2_near(float x) {
    float shifted = x + CLARY_ROUND;
    float r = x - (shifted - CLARY_ROUND);
    return FLOAT(BITS(exp2_of_rest(r)) + (BITS(shifted) << 23));
}

// 2^x for an integer x <= 0; +0 below -126 and for NaN.
SHARED float power_near(float x) {
    return x >= -126.0f ? FLOAT((BITS(x + CLARY_ROUND) << 23) + 0x3f800000u) : 0.0f;
}

// Weight codes are halves in units of 2^-24, the step of the smallest halves: their conversion rounds as Q_11.
#define WEIGHT_SHIFT 24

// Weights p times value scales of row R in place, and the row's maximum, sum and magnitude. PLAIN: all keys
// are seen and all p are normal.
template <int R, bool PLAIN>
SHARED Weighed weigh_row(float (&s)[32], float top, uint visible, const float* value_scales, uint& magnitude) {
    uint c = threadIdx.x % 4;
    float lane[2] = {0.0f, 0.0f};
    magnitude = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 scales = *(const float2*)(value_scales + 8 * j + 2 * c);
        const float of[2] = {scales.x, scales.y};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float& x = s[4 * j + 2 * R + e];
            bool seen = PLAIN || 8 * j + 2 * c + e < visible;
            float p = PLAIN ? exp2_near(x - top) : seen ? exp2_exact(x - top) : 0.0f;
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
    magnitude = quad_max(magnitude);
    return Weighed{top, lane[0] + lane[1], quantize_unit(11 - WEIGHT_SHIFT, magnitude)};
}

// Codes of both rows' weights as left operands: step k has the keys 16 k to 16 k + 15.
SHARED void code_weights(uint (&w)[4][4], const float (&s)[32], const uint (&magnitude)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float factor = quantize_factor(11 - WEIGHT_SHIFT, magnitude[r]);
#pragma unroll
        for (int j = 0; j < 8; j++)
            w[j / 2][r + 2 * (j % 2)] = half_pair(s[4 * j + 2 * r] * factor, s[4 * j + 2 * r + 1] * factor);
    }
}

// Scores of both rows to weight codes.
SHARED void weigh_rows(Weighed (&part)[2], uint (&w)[4][4], float (&s)[32], const uint (&visible)[2],
                       const float* value_scales) {
    // The lowest score, negative.
    float top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, low[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
    uint magnitude[2];
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = s[4 * j + 2 * r + e];
                top[r] = max_or_nan(top[r], x);
                low[r] = max_or_nan(low[r], -x);
            }
    bool plain = visible[0] == KEYS && visible[1] == KEYS;
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int h = 1; h <= 2; h++) top[r] = max_or_nan(top[r], __shfl_xor_sync(ALL_LANES, top[r], h));
        top[r] = ceilf(top[r]);
        // False for NaN and infinities too.
        plain = plain && low[r] + top[r] <= 126.0f;
    }
    if (!__any_sync(ALL_LANES, !plain)) {
        part[0] = weigh_row<0, true>(s, top[0], KEYS, value_scales, magnitude[0]);
        part[1] = weigh_row<1, true>(s, top[1], KEYS, value_scales, magnitude[1]);
    } else {
        uint c = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = NEGATIVE_INFINITY;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float x = s[4 * (i / 2) + 2 * r + i % 2];
                if (8 * (i / 2) + 2 * c + i % 2 < visible[r]) top[r] = x > top[r] ? x : top[r];
            }
#pragma unroll
            for (int h = 1; h <= 2; h++) {
                float other = __shfl_xor_sync(ALL_LANES, top[r], h);
                top[r] = other > top[r] ? other : top[r];
            }
            top[r] = ceilf(top[r]);
        }
        part[0] = weigh_row<0, false>(s, top[0], visible[0], value_scales, magnitude[0]);
        part[1] = weigh_row<1, false>(s, top[1], visible[1], value_scales, magnitude[1]);
        // A group without codes may hold infinities and NaN.
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (quantize_factor(11 - WEIGHT_SHIFT, magnitude[i / 2 % 2]) == 0.0f) s[i] = 0.0f;
    }
    code_weights(w, s, magnitude);
}

// How a block's dots join what a row of the span holds: held = dots * first * second + held * of_held, where
// the products of powers of two are exact. `first` is 1 unless their product would not be.
struct Joining {
    float of_held, first, second;
};

SHARED Joining join_of(Fold& fold, const Weighed& part) {
    if (!fold.seen) {
        // Nothing is held: zeros.
        fold = Fold{part.max, part.sum, true};
        return Joining{1.0f, 1.0f, part.unit};
    }
    float both = part.max > fold.max ? part.max : fold.max;
    float of_part = power_near(part.max - both), of_held = power_near(fold.max - both);
    fold.sum = FMA(part.sum, of_part, fold.sum * of_held);
    fold.max = both;
    // Least factor that is exact with any unit.
    bool tiny = of_part < FLOAT((127 - 70) << 23);
    return Joining{of_held, tiny ? part.unit : 1.0f, tiny ? of_part : part.unit * of_part};
}

SHARED void begin_values(float (&d)[32], const uint (&w)[4][4], const Halves& stage, int part) {
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) registers_product(d, w[k], stage.values + part * TILE, k, k > 0);
    products_commit();
}

// Values of a block into those of the span.
SHARED void fold_block(float (&held)[GROUPS][32], Fold (&fold)[2], const Weighed (&part)[2],
                       const uint (&w)[4][4], const Halves& stage) {
    float dots[2][32];
    const Joining joining[2] = {join_of(fold[0], part[0]), join_of(fold[1], part[1])};
    bool rescales = !(joining[0].of_held == 1.0f && joining[1].of_held == 1.0f);
    bool is_tiny = !(joining[0].first == 1.0f && joining[1].first == 1.0f);
    if (__any_sync(ALL_LANES, rescales)) {
#pragma unroll
        for (int i = 0; i < GROUPS * 32; i++)
            held[i / 32][i % 32] = held[i / 32][i % 32] * joining[i / 2 % 2].of_held;
    }
    is_tiny = __any_sync(ALL_LANES, is_tiny);
    begin_values(dots[0], w, stage, 0);
#pragma unroll
    for (int d = 0; d < GROUPS; d++) {
        if (d + 1 < GROUPS) {
            begin_values(dots[(d + 1) % 2], w, stage, d + 1);
            products_wait<1>();
        } else {
            products_wait<0>();
        }
        if (is_tiny) {
#pragma unroll
            for (int i = 0; i < 32; i++) dots[d % 2][i] = dots[d % 2][i] * joining[i / 2 % 2].first;
        }
#pragma unroll
        for (int i = 0; i < 32; i++)
            held[d][i] = FMA(dots[d % 2][i], joining[i / 2 % 2].second, held[d][i]);
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

// Takes a span of row R into what lies in the row's 8 vectors from `out` on and clears what is held. LAST:
// divides by the sum; before, that memory has each lane's values in fours, lanes side by side.
template <int R>
SHARED void fold_span(float4* out, Fold& whole, float (&held)[GROUPS][32], Fold& fold, bool last) {
    Factors factors = admit(whole, fold.max, fold.sum);
    float inverse = last ? DIVIDE(1.0f, whole.sum) : 1.0f;
    float4* own = out + threadIdx.x % 32;
    fold.seen = false;
    // Loads of two groups of dims are in flight together.
#pragma unroll
    for (int d = 0; d < GROUPS; d += 2) {
        float4 before[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            before[i] = factors.first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : own[32 * (4 * d + i)];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float of[4] = {before[i].x, before[i].y, before[i].z, before[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = held[d + i / 4][8 * (i % 4) + 2 * R + e / 2 * 4 + e % 2];
                x = folded(factors, of[e], x) * inverse;
            }
        }
    }
    if (last) {
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
#pragma unroll
    for (int i = 0; i < 16 * GROUPS; i++) held[i / 16][i / 2 % 8 * 4 + 2 * R + i % 2] = 0.0f;
}

// Writes a span of row R as a part.
template <int R>
SHARED void store_part(const Partial& partial, ulong part, const float (&held)[GROUPS][32], const Fold& fold) {
    store_row<R>((float2*)(partial.values + part * (64 * GROUPS)), held);
    if (threadIdx.x % 4 == 0) *(float2*)(partial.folds + 2 * part) = make_float2(fold.max, fold.sum);
}

SHARED Rows rows_of(const StepWindow& window, const AttentionShape& shape, const Queries& queries,
                    const Vectors& vectors, uint first) {
    uint lane = threadIdx.x % 32, n = lane / 4;
    Rows rows;
    rows.wide = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows.at[r] = first + threadIdx.x / 32 * 2 + r;
        rows.index[r] = window.start + rows.at[r];
        uint row = window.first + min(rows.at[r], window.rows - 1);
        uint vector = row * shape.heads + vectors.head + n;
        rows.home[r] = (vector - n) * (16 * GROUPS);
        Units units = units_of(queries, vector);
        rows.wide = rows.wide || units.wide;
        // A fault's dots are 0.
        rows.factor[r] = units.largest * shape.scale;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            if (units.of[g] != units.of[g]) rows.factor[r] = CLARY_NAN;
    }
    rows.wide = __any_sync(ALL_LANES, rows.wide);
    return rows;
}

SHARED int last_block(const StepWindow& window, const Rows& rows, int r) {
    return rows.at[r] < window.rows ? (int)(rows.index[r] / KEYS) : -1;
}

// Grid [row tiles of 16, tiles of 8 heads (by span, where shape.spans says that spans are apart), windows],
// 256 threads, room for a Room.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_warpgroup(StepTables step, KvPool pool, AttentionShape shape, Queries queries, float* out,
                        Partial partial) {
    extern __shared__ __align__(1024) uchar memory[];
    Room& room = *(Room*)memory;
    const uint group = warpgroup();
    // A long launch: the waiting blocks of the next would take from its own.
    wait_for_launches_before();
    const StepWindow window = step.windows[blockIdx.z];
    // The longest first.
    uint first = (gridDim.x - 1 - blockIdx.x) * TILE_ROWS;
    if (is_small(window) || first >= window.rows) return;
    uint tiles = tiles_of(shape, pool), span = blockIdx.y / tiles;
    Vectors vectors = vectors_of(shape, pool, blockIdx.y % tiles);
    Rows rows = rows_of(window, shape, queries, vectors, first);
    int blocks = (window.start + min(first + TILE_ROWS, window.rows) - 1) / KEYS + 1;
    int begin = span * SPAN_BLOCKS;
    if (begin >= blocks) return;
    if (shape.spans > 0) blocks = min(blocks, begin + SPAN_BLOCKS);
    auto page_at = [&](int block) {
        return page_of(step, window, (uint)min(block, blocks - 1) * KEYS);
    };
    auto in_page = [&](uint page) { return kv_block(pool, page, vectors.kv_head); };
    // Pages of the next two blocks: known a block before they are copied.
    uint pages[2] = {page_at(begin + 1), page_at(begin + 2)};
    copy_ahead(room, group, in_page(page_at(begin)));
    copy_scales(room.scales[0], in_page(page_at(begin)));
    commit_copies();
    load_queries(room, group, window, queries, shape.heads, vectors.head, first);
    wait_for_copies<0>();
    make_halves(room.stages[0], room, group);
    if (begin + 1 < blocks) copy_ahead(room, group, in_page(pages[0]));
    commit_copies();
    publish_to_products();
    __syncthreads();
    float held[GROUPS][32] = {};
    Fold fold[2] = {}, whole[2] = {};
    // Blocks in which the rows end; a row that is not there walks with the others and is not written.
    const int last[2] = {last_block(window, rows, 0), last_block(window, rows, 1)};
    for (int block = begin; block < blocks; block++) {
        uint page_later = page_at(block + 3);
        uint turn = (uint)block % 2;
        auto prepare_next = [&] {
            if (block + 1 < blocks) {
                wait_for_copies<1>();
                make_halves(room.stages[1 - turn], room, group);
            }
            if (block + 2 < blocks) copy_ahead(room, group, in_page(pages[1]));
            commit_copies();
        };
        if (block + 1 < blocks) copy_scales(room.scales[1 - turn], in_page(pages[0]));
        commit_copies();
        if (group == 0) prepare_next();
        const uint visible[2] = {keys_seen(rows.index[0], block), keys_seen(rows.index[1], block)};
        const float* scales = room.scales[turn];
        float s[32];
        uint w[4][4];
        Weighed weighed[2];
        score_block(s, room.queries[group], room.stages[turn], rows, queries, scales);
        weigh_rows(weighed, w, s, visible, scales + GROUPS * KEYS);
        fold_block(held, fold, weighed, w, room.stages[turn]);
        if (group == 1) prepare_next();
        pages[0] = pages[1];
        pages[1] = page_later;
        bool span_ends = (uint)(block + 1) % SPAN_BLOCKS == 0;
        auto joins = [&](uint r) { return shape.spans > 0 && rows.index[r] >= SPAN_BLOCKS * KEYS; };
        auto part = [&](uint r) {
            uint row = blockIdx.z * shape.rows_max + rows.at[r];
            return part_at(shape, row, vectors.head + threadIdx.x % 32 / 4, span);
        };
        if (block <= last[0] && (span_ends || block == last[0])) {
            if (joins(0))
                store_part<0>(partial, part(0), held, fold[0]);
            else
                fold_span<0>((float4*)out + rows.home[0], whole[0], held, fold[0], block == last[0]);
        }
        if (block <= last[1] && (span_ends || block == last[1])) {
            if (joins(1))
                store_part<1>(partial, part(1), held, fold[1]);
            else
                fold_span<1>((float4*)out + rows.home[1], whole[1], held, fold[1], block == last[1]);
        }
        wait_for_copies<1>();
        publish_to_products();
        __syncthreads();
    }
}
