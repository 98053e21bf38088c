// What a block of threads of attention_warpgroup has in shared memory, and how queries, keys and values come
// there as halves.
//
// HALVES 1: keys and values lie in memory as halves (attention_halves), the copy engine brings them. 0: the
// third warpgroup makes halves of them.
#pragma once
#include "attention.cuh"
#include "warpgroup.cuh"

#ifndef HALVES
#define HALVES 0
#endif

// Two warpgroups attend; the third brings the keys and values they need next.
#define THREADS 384
#define GROUP_THREADS 128
#define FILL_GROUP 2
#define TILE_ROWS 16
// 64 rows of 64 halves.
#define TILE 8192
// Pieces of 16 codes of K, or of V, that a thread turns into halves.
#define PIECES (GROUPS * KEYS * 4 / GROUP_THREADS)
// Blocks of keys there is room for.
#define STAGES 2

// Scales of 64 keys: those of a lane's c, 8 j + 2 c + e, side by side, c's apart so that they lie in other
// banks.
#define SCALES 80

SHARED uint scale_at(uint key) { return key % 8 / 2 * (SCALES / 4) + key / 8 * 2 + key % 2; }

struct Stage {
    uchar keys[GROUPS * TILE];    // [group][key][64 dims]
    uchar values[GROUPS * TILE];  // [dim][64 keys]
};

// A block of keys of a K/V head in memory.
struct HalfBlock {
    Stage stage;
    float scales[(GROUPS + 1) * SCALES];
    uchar pad[2048 - (GROUPS + 1) * SCALES * 4];
};

// By window and K/V head: room for `count` blocks each.
struct Halves {
    HalfBlock* blocks;
    ulong count;

    SHARED HalfBlock* of_head(const KvPool& pool, uint window, uint head) const {
        return blocks + (window * pool.kv_heads + head) * count;
    }
};

// What a thread that attends keeps of its rows beside values: products need its registers.
struct Aside {
    float4 spans[2][2 * GROUP_THREADS];   // the kernel's Span of row R
    float2 wholes[2][2 * GROUP_THREADS];  // maximum and sum of the spans before
    float bases[2][2 * GROUP_THREADS];    // whose values lie in `out` times 2^(maximum - base)
    float2 factors[2 * GROUP_THREADS];    // to scores: largest unit by the softmax's scale; NaN after a fault
    float4* out[2 * GROUP_THREADS];       // of the first row's 8 vectors
    ulong part[2 * GROUP_THREADS];        // of the first row and head n
};

struct Room {
    uchar queries[2][GROUPS * TILE];  // [group][8 r + h][64 dims], by warpgroup
    Stage stages[STAGES];
    float scales[STAGES][(GROUPS + 1) * SCALES];
    float ratios[2][64][GROUPS];  // of units to a vector's largest where they are not in the halves
    Aside aside;
    // By stage: keys or values and their scales are there; nobody reads them any more. By warpgroup: queries
    // are there. The first warpgroup has its first scores. An arrival a warp, or one for what is copied.
    ulong keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
    ulong queries_full[2], scored;
};

SHARED void begin_barriers(Room& room) {
    if (threadIdx.x > 0) return;
    const uint fillers = HALVES ? 1 : GROUP_THREADS / 32;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(room.keys_full + i, fillers);
        barrier_init(room.values_full + i, fillers);
        barrier_init(room.keys_empty + i, 2 * GROUP_THREADS / 32);
        barrier_init(room.values_empty + i, 2 * GROUP_THREADS / 32);
    }
    barrier_init(room.queries_full, GROUP_THREADS / 32);
    barrier_init(room.queries_full + 1, GROUP_THREADS / 32);
    barrier_init(&room.scored, GROUP_THREADS / 32);
    barriers_made();
}

// A warp's arrival, after all that its lanes have done.
SHARED void arrive(ulong* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Where the 16-byte chunk `chunk` of a row of 64 halves lies: products read tiles in this order.
SHARED uint chunk_at(uint row, uint chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

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

// Four signed bytes as two pairs of halves: 1024 + 128 + code is put together from bits, then 1152 taken off.
SHARED uint2 halves_of(uint codes) {
    uint lifted = codes ^ 0x80808080u;
    return make_uint2(half_pair_minus(pick_bytes(lifted, 0x64646464u, 0x4140), 0x64806480u),
                      half_pair_minus(pick_bytes(lifted, 0x64646464u, 0x4342), 0x64806480u));
}

// The same in all lanes of a warp, and the compiler knows it.
SHARED uint warpgroup() { return __shfl_sync(ALL_LANES, threadIdx.x / GROUP_THREADS, 0); }

// Halves hold codes of a vector in its largest unit: codes of a smaller one are multiplied by the ratio of
// the units, which leaves them normal down to this one. A vector whose units lie further apart is wide: it
// keeps its codes, and its sums are multiplied.
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
SHARED void load_queries(Room& room, uint group_at, const StepWindow& window, const Queries& queries,
                         uint heads, uint head, uint first) {
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
                    int high = (schar)(highs[word] >> byte), low = (schar)(lows[word] >> byte);
                    code[e] = __int2float_rn(256 * high + low);
                }
                halves[pair] = half_pair(code[0] * ratio, code[1] * ratio);
            }
            *(uint4*)(to + group * TILE + chunk_at(m, 2 * quad + chunk)) =
                make_uint4(halves[0], halves[1], halves[2], halves[3]);
        }
        if (quad == 0) {
            float of_sums = 1.0f;
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                if (g == group && units.wide) of_sums = units.ratio(g);
            room.ratios[group_at][m][group] = of_sums;
        }
    }
    publish_to_products();
    arrive(room.queries_full + group_at);
}

// A thread's pieces of K or V of a block: piece i has the codes 16 c to 16 c + 15 of row 32 i + t / 4,
// c = t % 4.
SHARED void load_pieces(uint4 (&pieces)[PIECES], const schar* codes) {
    const uint4* from = (const uint4*)codes + threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (int i = 0; i < PIECES; i++) pieces[i] = from[i * GROUP_THREADS];
}

// Pieces of K as halves: row 64 g + k has the 64 dims of group g of key k.
SHARED void store_keys(uchar* to, const uint4 (&pieces)[PIECES]) {
    uint row = threadIdx.x % GROUP_THREADS / 4, c = threadIdx.x % 4;
    uchar *first = to + chunk_at(row, 2 * c), *second = to + chunk_at(row, 2 * c + 1);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const uint4& codes = pieces[i];
        uint2 x = halves_of(codes.x), y = halves_of(codes.y), z = halves_of(codes.z), w = halves_of(codes.w);
        // Rows in steps of 8 have their chunks in the same order.
        *(uint4*)(first + i * 32 * 128) = make_uint4(x.x, x.y, y.x, y.y);
        *(uint4*)(second + i * 32 * 128) = make_uint4(z.x, z.y, w.x, w.y);
    }
}

// Pieces of V as halves: pair j is what keys 8 j + 2 c and the next have (value_slot).
SHARED void store_values(uchar* to, const uint4 (&pieces)[PIECES]) {
    uint row = threadIdx.x % GROUP_THREADS / 4, c = threadIdx.x % 4;
    uchar* chunks[8];
#pragma unroll
    for (int j = 0; j < 8; j++) chunks[j] = to + chunk_at(row, j) + 4 * c;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const uint4& codes = pieces[i];
        uint2 x = halves_of(codes.x), y = halves_of(codes.y), z = halves_of(codes.z), w = halves_of(codes.w);
        const uint pairs[8] = {x.x, x.y, y.x, y.y, z.x, z.y, w.x, w.y};
#pragma unroll
        for (int j = 0; j < 8; j++) *(uint*)(chunks[j] + i * 32 * 128) = pairs[j];
    }
}

// Where a warpgroup is in the ring of stages.
struct Turn {
    uint stage, parity;

    SHARED void next() {
        stage ^= 1;
        parity ^= stage == 0;
    }
};

// The third warpgroup: halves of blocks `begin` to `blocks` - 1; page_at gives the page of a block, in_page a
// KvBlock. Loads are begun after stores are published, which would wait for them.
template <class PageAt, class InPage>
SHARED void fill_stages(Room& room, int begin, int blocks, const PageAt& page_at, const InPage& in_page) {
    const uint thread = threadIdx.x % GROUP_THREADS;
    const uint key_scales = GROUPS * KEYS / 4, all_scales = key_scales + KEYS / 4;
    uint page = page_at(begin);
    uint4 pieces[PIECES];
    // Of four keys of one group or of V.
    float4 scales = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const uint scales_at = thread / (KEYS / 4) * SCALES + scale_at(thread % (KEYS / 4) * 4);
    auto store_scales = [&](float* to) {
        *(float2*)(to + scales_at) = make_float2(scales.x, scales.y);
        *(float2*)(to + scales_at + SCALES / 4) = make_float2(scales.z, scales.w);
    };
    auto load_keys = [&] {
        const KvBlock from = in_page(page);
        load_pieces(pieces, from.codes);
        if (thread < all_scales) scales = ((const float4*)from.scales)[thread];
    };
    load_keys();
    Turn turn = {0, 0};
#pragma unroll 1
    for (int block = begin; block < blocks; block++, turn.next()) {
        const uint page_next = page_at(min(block + 1, blocks - 1));
        Stage& stage = room.stages[turn.stage];
        barrier_wait(room.keys_empty + turn.stage, turn.parity ^ 1);
        store_keys(stage.keys, pieces);
        if (thread < key_scales) store_scales(room.scales[turn.stage]);
        publish_to_products();
        arrive(room.keys_full + turn.stage);
        load_pieces(pieces, in_page(page).codes + PLANE);
        barrier_wait(room.values_empty + turn.stage, turn.parity ^ 1);
        store_values(stage.values, pieces);
        if (thread >= key_scales && thread < all_scales) store_scales(room.scales[turn.stage]);
        publish_to_products();
        arrive(room.values_full + turn.stage);
        page = page_next;
        load_keys();
    }
}

// One warp: blocks `begin` to `blocks` - 1 of those of a head.
SHARED void copy_stages(Room& room, int begin, int blocks, const HalfBlock* head) {
    Turn turn = {0, 0};
#pragma unroll 1
    for (int block = begin; block < blocks; block++, turn.next()) {
        const HalfBlock& from = head[block];
        Stage& stage = room.stages[turn.stage];
        float* scales = room.scales[turn.stage];
        ulong *keys = room.keys_full + turn.stage, *values = room.values_full + turn.stage;
        barrier_wait(room.keys_empty + turn.stage, turn.parity ^ 1);
        barrier_expect(keys, sizeof(stage.keys) + GROUPS * SCALES * 4);
        copy_bulk(stage.keys, from.stage.keys, sizeof(stage.keys), keys);
        copy_bulk(scales, from.scales, GROUPS * SCALES * 4, keys);
        barrier_wait(room.values_empty + turn.stage, turn.parity ^ 1);
        barrier_expect(values, sizeof(stage.values) + SCALES * 4);
        copy_bulk(stage.values, from.stage.values, sizeof(stage.values), values);
        copy_bulk(scales + GROUPS * SCALES, from.scales + GROUPS * SCALES, SCALES * 4, values);
    }
}
