// Attention of a picture, without a mask (crates/device/src/cpu/attention.rs): every row sees all keys of its
// window.
//
// The work of attention.cuh, with other vectors: a warp has SETS times 8 consecutive rows of one head, so
// that what it loads of K and V serves all of them, and a block of threads 8 warps. Heads of 72 are a group
// of 64 and one of 8: of the last group only LAST dims are copied and multiplied, of V only whole eights of
// dims. Bound: issue slots, about 170 for 64 scores of a warp, a third of them exp2 and the codes of the
// weights.
#include "attention.cuh"

#define WARPS 8
// Sets of 8 rows of a warp.
#ifndef SETS
#define SETS 1
#endif
// Blocks of threads that share a multiprocessor.
#ifndef BLOCKS
#define BLOCKS 1
#endif
// Dims of the last group, in eights.
#ifndef LAST
#define LAST 64
#endif

// Eights of value dims.
#define EIGHTS ((GROUPS - 1) * 8 + LAST / 8)
// Bytes of a key in the last group: of up to 16 dims, the first lane of four has all.
#define LAST_BYTES (LAST <= 16 ? 16 : 64)
#define KEY_PLANE (((GROUPS - 1) * 64 + LAST_BYTES) * KEYS)
#define VALUE_PLANE (EIGHTS * 8 * KEYS)

// A block of a K/V head in shared memory: K digits, then V digits.
struct Staged {
    schar keys[DIGITS][KEY_PLANE];
    schar values[DIGITS][VALUE_PLANE];
    float scales[(GROUPS + 1) * KEYS];
};

struct Room {
    Staged stages[2];
    // Values of the spans before, by thread.
    float held[SETS][EIGHTS][2][32 * WARPS];
};

SHARED void stage_block(Staged& to, const KvBlock& from) {
    uint t = threadIdx.x;
#pragma unroll
    for (uint digit = 0; digit < DIGITS; digit++) {
        const schar* keys = from.codes + digit * PLANE;
        const schar* values = from.codes + (DIGITS + digit) * PLANE;
        for (uint i = t * 16; i < (GROUPS - 1) * 64 * KEYS; i += 32 * WARPS * 16)
            copy_async_16(to.keys[digit] + i, keys + i);
        for (uint i = t; i < KEYS * LAST_BYTES / 16; i += 32 * WARPS) {
            uint key = i / (LAST_BYTES / 16), part = i % (LAST_BYTES / 16);
            copy_async_16(to.keys[digit] + (GROUPS - 1) * 64 * KEYS + i * 16,
                          keys + (GROUPS - 1) * 64 * KEYS + key * 64 + part * 16);
        }
        for (uint i = t * 16; i < VALUE_PLANE; i += 32 * WARPS * 16)
            copy_async_16(to.values[digit] + i, values + i);
    }
    for (uint i = t * 4; i < (GROUPS + 1) * KEYS; i += 32 * WARPS * 4)
        copy_async_16(to.scales + i, from.scales + i);
    commit_copies();
}

// What key `key` has at dims 16 c of group g.
SHARED uint4 key_dims(const schar* keys, int g, uint key, uint c) {
    if (g + 1 < GROUPS || LAST_BYTES == 64)
        return *(const uint4*)(keys + g * (KEYS * 64) + key * 64 + c * 16);
    if (c > 0) return uint4{0, 0, 0, 0};
    return *(const uint4*)(keys + g * (KEYS * 64) + key * 16);
}

// exp2_exact of x <= 0 (or NaN), the same bits: one factor, for 2^x does not overflow.
SHARED float exp2_below_one(float x) {
    float c = x < -126.0f ? -126.0f : x;
    float shifted = c + CLARY_ROUND;
    float r = c - (shifted - CLARY_ROUND);
    // The low bits of shifted are those of the exponent.
    float result = exp2_of_rest(r) * FLOAT((BITS(shifted) << 23) + 0x3f800000u);
    return x < -126.0f ? 0.0f : result;
}

// Byte `at` (0 or 1) of four words, in order.
SHARED uint bytes_of(const uint (&x)[4], uint at) {
    uint low = __byte_perm(x[0], x[1], at | (at + 4) << 4),
         high = __byte_perm(x[2], x[3], at | (at + 4) << 4);
    return __byte_perm(low, high, 0x5410);
}

// weigh() of attention.cuh with fewer steps, the same bits; the value scales of keys that are not seen are 0.
// A code is the low bits of x * factor + 1.5 2^23, its high digit byte 1 of that plus 128; of a group that
// faults any codes will do, for its unit is NaN.
SHARED Weighed weigh_block(float (&s)[16], float scale, uint visible, const float* value_scales,
                           uint (&w)[2][4]) {
    uint c = threadIdx.x % 4;
    float top = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        s[i] = 8 * (i / 2) + 2 * c + i % 2 < visible ? s[i] * scale : NEGATIVE_INFINITY;
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
        float2 scales = *(const float2*)(value_scales + 8 * t);
        const float of[2] = {scales.x, scales.y};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float p = exp2_below_one(s[2 * t + e] - part.max);
            lane[e] = lane[e] + p;
            s[2 * t + e] = p * of[e];
            magnitude = max(magnitude, BITS(s[2 * t + e]) & 0x7fffffffu);
        }
    }
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
        uint code[4], upper[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            code[i] = BITS(FMA(s[4 * four + i], factor, CLARY_ROUND));
            upper[i] = code[i] + 128;
        }
        w[four / 2][four % 2 * 2] = bytes_of(upper, 1);
        w[four / 2][four % 2 * 2 + 1] = bytes_of(code, 0);
    }
    return part;
}

// One staged block into the values of the span.
SHARED void full_block(float (&part)[SETS][EIGHTS][2], Fold (&fold)[SETS], const Query (&query)[SETS],
                       const Staged& staged, float scale, uint visible) {
    uint lane = threadIdx.x % 32, n = lane / 4, c = lane % 4;
    float s[SETS][16];
    uint w[SETS][2][4];
#pragma unroll
    for (int t = 0; t < 8; t++) {
        float score[SETS][2];
#pragma unroll
        for (int set = 0; set < SETS; set++) score[set][0] = score[set][1] = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            uint4 k[DIGITS];
#pragma unroll
            for (int digit = 0; digit < DIGITS; digit++)
                k[digit] = key_dims(staged.keys[digit], g, 8 * t + n, c);
            float2 scales = *(const float2*)(staged.scales + g * KEYS + 8 * t + 2 * c);
            const float of[2] = {scales.x, scales.y};
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                float dot[DIGITS][2];
#pragma unroll
                for (int digit = 0; digit < DIGITS; digit++) {
                    int acc[4] = {0, 0, 0, 0};
                    multiply_add_8bit(acc, query[set].a[g][0], k[digit].x, k[digit].y);
                    // Dims 8 to 15 of 16.
                    if (g + 1 < GROUPS || LAST > 8)
                        multiply_add_8bit(acc, query[set].a[g][1], k[digit].z, k[digit].w);
                    dot[digit][0] = __int2float_rn(joined(acc[0], acc[2]));
                    dot[digit][1] = __int2float_rn(joined(acc[1], acc[3]));
                }
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float i = DIGITS == 1 ? dot[0][e] : FMA(256.0f, dot[0][e], dot[DIGITS - 1][e]);
                    score[set][e] = FMA(i, of[e] * query[set].unit[g], score[set][e]);
                }
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            s[set][2 * t] = score[set][0];
            s[set][2 * t + 1] = score[set][1];
        }
    }
    Factors factors[SETS];
    float unit[SETS];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        Weighed weighed = weigh_block(s[set], scale, visible, staged.scales + GROUPS * KEYS + 2 * c, w[set]);
        factors[set] = admit(fold[set], weighed.max, weighed.sum);
        unit[set] = weighed.unit;
    }
#pragma unroll
    for (int d = 0; d < EIGHTS; d++) {
        uint4 v[DIGITS];
#pragma unroll
        for (int digit = 0; digit < DIGITS; digit++)
            v[digit] = *(const uint4*)(staged.values[digit] + (8 * d + n) * KEYS + c * 16);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float dot[2];
            value_dots(dot, w[set], v);
#pragma unroll
            for (int e = 0; e < 2; e++)
                part[set][d][e] = folded(factors[set], part[set][d][e], dot[e] * unit[set]);
        }
    }
}

// Takes a span into what is held.
SHARED void fold_span(Room& room, Fold (&whole)[SETS], const float (&part)[SETS][EIGHTS][2],
                      Fold (&fold)[SETS]) {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        Factors factors = admit(whole[set], fold[set].max, fold[set].sum);
        fold[set].seen = false;
#pragma unroll
        for (int d = 0; d < EIGHTS; d++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& held = room.held[set][d][e][threadIdx.x];
                held = folded(factors, held, part[set][d][e]);
            }
    }
}

// Keys and pages of each window: words[2 w] keys, words[2 w + 1] where its pages begin among all words. Grid
// [row tiles of 64 SETS, heads, windows], 256 threads.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    full_attention(StepTables step, KvPool pool, AttentionShape shape, const uint* words, Queries queries,
                   float* out) {
    extern __shared__ __align__(16) uchar memory[];
    Room& room = *(Room*)memory;
    wait_for_launches_before();
    uint lane = threadIdx.x % 32, n = lane / 4, c = lane % 4, head = blockIdx.y;
    const StepWindow window = step.windows[blockIdx.z];
    uint first = (blockIdx.x * WARPS + threadIdx.x / 32) * 8 * SETS;
    if (blockIdx.x * WARPS * 8 * SETS >= window.rows) return;
    uint keys = words[2 * blockIdx.z], blocks = (keys + KEYS - 1) / KEYS;
    const uint* pages = words + words[2 * blockIdx.z + 1];
    auto block_at = [&](uint block) {
        return kv_block(pool, pages[block], head / (shape.heads / pool.kv_heads));
    };
    stage_block(room.stages[0], block_at(0));
    Query query[SETS];
    float part[SETS][EIGHTS][2];
    Fold fold[SETS], whole[SETS];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        // Rows that are not there repeat the last one.
        uint row = window.first + min(first + 8 * set + n, window.rows - 1);
        load_query(query[set], queries, (ulong)row * shape.heads + head);
        fold[set] = whole[set] = Fold{0.0f, 0.0f, false};
    }
    for (uint block = 0; block < blocks; block++) {
        wait_for_copies<0>();
        __syncthreads();
        if (block + 1 < blocks) stage_block(room.stages[(block + 1) % 2], block_at(block + 1));
        Staged& staged = room.stages[block % 2];
        uint visible = min((uint)KEYS, keys - block * KEYS);
        if (visible < KEYS) {
            if (threadIdx.x >= visible && threadIdx.x < KEYS)
                staged.scales[GROUPS * KEYS + threadIdx.x] = 0.0f;
            __syncthreads();
        }
        full_block(part, fold, query, staged, shape.scale, visible);
        if ((block + 1) % SPAN_BLOCKS == 0 || block + 1 == blocks) fold_span(room, whole, part, fold);
    }
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        uint row = first + 8 * set + n;
        if (row >= window.rows) break;
        float inverse = DIVIDE(1.0f, whole[set].sum);
        float* to = out + ((ulong)(window.first + row) * shape.heads + head) * pool.head_dim;
#pragma unroll
        for (int d = 0; d < EIGHTS; d++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint dim = 8 * d + 2 * c + e;
                if (dim < pool.head_dim) to[dim] = room.held[set][d][e][threadIdx.x] * inverse;
            }
    }
}
