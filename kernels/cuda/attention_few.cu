// Attention of chains of few rows: attention_few has a block of threads for every row and span of 512 keys
// (attention.cu has those of trees and of rows that share what is loaded, and attention_fold, which joins
// spans). All warps work on every block of keys, so that a short sequence leaves none idle, and the code is
// short: it is fetched anew in every layer.
#include "attention_span.cuh"

// Parts that a warp has on their way: a constant of the compilation. 8 (of one digit) are all keys of a span:
// sooner for the blocks of one row, of which a multiprocessor has one.
#ifndef PARTS
#define PARTS RING
#endif

// Most blocks of a launch that rehearses: each of them works once on whatever lies there while the launches
// before still run, and forgets it. Few blocks lie on other multiprocessors in every layer, and bringing
// their code into the caches of instructions would take longer than the work itself.
#ifndef REHEARSED_BLOCKS
#if __CUDA_ARCH__ >= 900
#define REHEARSED_BLOCKS 33
#else
#define REHEARSED_BLOCKS 0
#endif
#endif

// The first pass: number 0 is a rehearsal.
SHARED uint first_pass() {
    return REHEARSED_BLOCKS && gridDim.x * gridDim.y * gridDim.z <= REHEARSED_BLOCKS ? 0 : 1;
}

// What the warps tell each other, and what is copied ahead.
struct FewRoom {
    float scores[SPAN_BLOCKS][8][KEYS];  // of vector n, key k at (k + 8 n) % 64
    uint weights[SPAN_BLOCKS][2][32][4];
    Weighed parts[SPAN_BLOCKS][8];
    float scales[SPAN_BLOCKS][(GROUPS + 1) * KEYS];
    schar parts_of_blocks[SPAN_BLOCKS][PARTS][DIGITS][SLICE];  // of a warp, see copy_part
    uint pages[SPAN_BLOCKS];
};

SHARED uint score_at(uint n, uint key) { return n * KEYS + (key + 8 * n) % KEYS; }

// Queues the copy of a warp's part of a block into its ring: 8 keys of K, or 8 GROUPS dims of V.
SHARED void copy_part(schar (&to)[DIGITS][SLICE], const KvBlock& block, bool of_values) {
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = of_values ? 512 : KEYS * 64;
    const schar* from = block.codes + (of_values ? DIGITS * PLANE + warp * SLICE : warp * 512) + lane * 16;
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++)
#pragma unroll
        for (uint g = 0; g < GROUPS; g++)
            copy_async_16(to[digit] + g * 512 + lane * 16, from + digit * PLANE + g * stride);
}

// What a lane has of a part: of group g of K its key n, of tile g of V its dim n.
SHARED void read_part(uint4 (&codes)[DIGITS], const schar (&part)[DIGITS][SLICE], uint g) {
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++)
        codes[digit] = *(const uint4*)(part[digit] + g * 512 + threadIdx.x % 32 * 16);
}

// Scores of the warp's 8 keys of a block.
SHARED void score_keys(FewRoom& room, uint at, const Query& query) {
    uint warp = threadIdx.x / 32, n = threadIdx.x % 32 / 4, key = 8 * warp + threadIdx.x % 4 * 2;
    float score[2] = {0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        uint4 k[DIGITS];
        read_part(k, room.parts_of_blocks[warp][at % PARTS], g);
        score_group(score, query, g, k, *(const float2*)(room.scales[at] + g * KEYS + key));
    }
    *(float2*)(&room.scores[at][0][0] + score_at(n, key)) = make_float2(score[0], score[1]);
}

// Weights of a block by two warps: a thread has a vector and the keys 8 t + l, one of the eight lanes of the
// sum over p. The same steps as in weigh.
SHARED void weigh_keys(FewRoom& room, uint at, uint visible, float scale) {
    uint l = threadIdx.x % 8, n = threadIdx.x % 64 / 8;
    const float* scores = &room.scores[at][0][0];
    const float* scales = room.scales[at] + GROUPS * KEYS;
    float s[8], top = NEGATIVE_INFINITY;
#pragma unroll
    for (uint t = 0; t < 8; t++) {
        // Without branches, here and below, so that all keys are on their way together.
        uint seen = 8 * t + l < visible ? ~0u : 0u;
        uint score = BITS(scores[score_at(n, 8 * t + l)] * scale);
        s[t] = FLOAT((score & seen) | (BITS(NEGATIVE_INFINITY) & ~seen));
        top = s[t] > top ? s[t] : top;
    }
#pragma unroll
    for (int h = 1; h <= 4; h <<= 1) {
        float other = __shfl_xor_sync(ALL_LANES, top, h);
        top = other > top ? other : top;
    }
    Weighed part;
    part.max = ceilf(top);
    part.sum = 0.0f;
    uint magnitude = 0;
#pragma unroll
    for (uint t = 0; t < 8; t++) {
        uint seen = 8 * t + l < visible ? ~0u : 0u;
        float p = FLOAT(BITS(exp2_exact(s[t] - part.max)) & seen);
        part.sum = part.sum + p;
        s[t] = FLOAT(BITS(p * scales[8 * t + l]) & seen);
        magnitude = max(magnitude, BITS(s[t]) & 0x7fffffffu);
    }
#pragma unroll
    for (int h = 4; h >= 1; h >>= 1) {
        part.sum = part.sum + __shfl_xor_sync(ALL_LANES, part.sum, h);
        magnitude = max(magnitude, __shfl_xor_sync(ALL_LANES, magnitude, h));
    }
    part.unit = quantize_unit(11, magnitude);
    float factor = quantize_factor(11, magnitude);
    // Digits of two codes as the bytes e and 2 + e, e = l % 2, of the words that hold keys 16 i + 2 c + 0, 1,
    // 8, 9.
    uint e = l % 2, high[4], low[4];
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        high[i] = low[i] = 0;
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            int code = factor == 0.0f ? 0 : __float2int_rn(s[2 * i + j] * factor);
            schar digit = (schar)code;
            low[i] |= ((uint)code & 0xffu) << (16 * j);
            high[i] |= ((uint)((code - digit) >> 8) & 0xffu) << (16 * j);
        }
        low[i] <<= 8 * e;
        high[i] <<= 8 * e;
    }
    // The even lane ends with the first two words of each digit, the odd one with the others.
    uint own[4];
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        uint other_high = __shfl_xor_sync(ALL_LANES, e ? high[i] : high[2 + i], 1);
        uint other_low = __shfl_xor_sync(ALL_LANES, e ? low[i] : low[2 + i], 1);
        own[2 * i] = (e ? high[2 + i] : high[i]) | other_high;
        own[2 * i + 1] = (e ? low[2 + i] : low[i]) | other_low;
    }
    *(uint4*)room.weights[at][e][4 * n + l / 2] = make_uint4(own[0], own[1], own[2], own[3]);
    if (l == 0) room.parts[at][n] = part;
}

// A block's values for the dims of a warp, part number `item`, into what is held.
SHARED void fold_values(float (&held)[GROUPS][2], Fold& fold, const FewRoom& room, uint at, uint item) {
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = lane / 4;
    Weighed part = room.parts[at][n];
    Factors factors = admit(fold, part.max, part.sum);
    uint w[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint4 four = *(const uint4*)room.weights[at][j][lane];
        w[j][0] = four.x, w[j][1] = four.y, w[j][2] = four.z, w[j][3] = four.w;
    }
#pragma unroll
    for (int d = 0; d < GROUPS; d++) {
        uint4 v[DIGITS];
        read_part(v, room.parts_of_blocks[warp][item % PARTS], d);
        float dot[2];
        value_dots(dot, w, v);
#pragma unroll
        for (int e = 0; e < 2; e++) held[d][e] = folded(factors, held[d][e], dot[e] * part.unit);
    }
}

// The blocks of a row's span.
struct Blocks {
    FewRoom& room;
    const KvPool& pool;
    uint kv_head;
    uint first;  // counts from the sequence's start
    uint count;

    SHARED KvBlock block(uint at) const { return span_block(pool, room.pages[at], kv_head); }

    // Queues the copy of the warp's part number `item`, if there is one: K of all blocks, then V.
    SHARED void copy(uint item) const {
        uint warp = threadIdx.x / 32, at = item < count ? item : item - count;
        if (at < count) copy_part(room.parts_of_blocks[warp][item % PARTS], block(at), item >= count);
        commit_copies();
    }
};

// Attends with 8 vectors, the lane's n being vector `vector` of the step's at token `index`. Warp i scores
// keys 8 i to 8 i + 7 of every block, two warps weigh a block, then warp i has GROUPS tiles of 8 dims of all
// blocks.
SHARED void attend(float (&held)[GROUPS][2], Fold& fold, const Blocks& blocks, const Queries& queries,
                   ulong vector, uint index, float scale) {
    FewRoom& room = blocks.room;
    uint warp = threadIdx.x / 32, count = blocks.count;
    if (warp < count) copy_scales(room.scales[warp], blocks.block(warp));
    commit_copies();
#pragma unroll 1
    for (uint item = 0; item < PARTS; item++) blocks.copy(item);
    Query query;
    load_query(query, queries, vector);
    wait_for_copies<PARTS>();
    __syncthreads();
#pragma unroll 1
    for (uint at = 0; at < count; at++) {
        wait_for_copies<PARTS - 1>();
        __syncwarp();
        score_keys(room, at, query);
        __syncwarp();
        blocks.copy(at + PARTS);
    }
    __syncthreads();
#pragma unroll 1
    for (uint at = warp / 2; at < count; at += 4)
        weigh_keys(room, at, keys_seen(index, blocks.first + at), scale);
    __syncthreads();
    fold = Fold{};
#pragma unroll 1
    for (uint at = 0; at < count; at++) {
        wait_for_copies<PARTS - 1>();
        __syncwarp();
        fold_values(held, fold, room, at, count + at);
        __syncwarp();
        blocks.copy(count + at + PARTS);
    }
}

// Grid [spans, tiles * rows_max, windows], 256 threads, room for a FewRoom.
extern "C" __global__ void __launch_bounds__(256, DIGITS == 1 ? 2 : 1)
    attention_few(StepTables step, KvPool pool, AttentionShape shape, Queries queries, float* out,
                  Partial partial) {
    extern __shared__ __align__(16) uchar memory[];
    FewRoom& room = *(FewRoom*)memory;
    start_next_launch();
    uint n = threadIdx.x % 32 / 4, tiles = tiles_of(shape, pool), row_at = blockIdx.y / tiles;
    const StepWindow window = step.windows[shape.first_window + blockIdx.z];
    if (!is_small(window) || shape.first_row + row_at >= window.rows) return wait_for_launches_before();
    Vectors vectors = vectors_of(shape, pool, blockIdx.y % tiles);
    uint row = window.first + shape.first_row + row_at, index = step.rows[row].index;
    uint all = index / KEYS + 1, first = blockIdx.x * SPAN_BLOCKS;
    if (first >= all) return wait_for_launches_before();
    Blocks blocks{room, pool, vectors.kv_head, first, min((uint)SPAN_BLOCKS, all - first)};
    // Vectors that are not there repeat one that is.
    ulong vector = (ulong)row * shape.heads + vectors.head + min(n, vectors.count - 1);
    // Before the launches before this one are done: pages are named, not read.
    if (threadIdx.x < blocks.count)
        room.pages[threadIdx.x] = page_of(step, window, (first + threadIdx.x) * KEYS);
    __syncthreads();
#pragma unroll 1
    for (uint at = 0; at < blocks.count; at++)
        for (uint i = threadIdx.x * 128; i < 2 * DIGITS * PLANE; i += 256 * 128)
            prefetch(blocks.block(at).codes + i);
    float held[GROUPS][2];
    Fold fold;
#pragma unroll 1
    for (uint pass = first_pass(); pass < 2; pass++) {
        if (pass == 1) wait_for_launches_before();
        attend(held, fold, blocks, queries, vector, index, shape.scale);
        __syncthreads();
    }
    if (n >= vectors.count) return;
    ulong part = part_at(shape, blockIdx.z * shape.rows_max + row_at, vectors.head + n, blockIdx.x);
    write_vector(held, fold, index, out + vector * pool.head_dim, partial, part, pool.head_dim);
}
