// Attention of small windows and trees: attention_spans has a block of threads for every span of 512 keys,
// attention_fold joins them.
#include "attention_span.cuh"

// Rows of a window that share what is loaded of K and V: a constant of the compilation; trees take 1.
#ifndef ROWS
#define ROWS 1
#endif

// Key `index` of a tree row as page * 64 + slot: ancestors lie at their own places. Keys that the row does
// not see are read from its own place.
SHARED uint tree_place(const StepTables& step, const StepWindow& window, const StepRow& row, uint index) {
    uint storage = index;
    if (index > row.index) {
        storage = row.storage;
    } else if (index >= window.start) {
        uint left = row.ancestors;
        for (uint depth = index - window.start; depth > 0; depth--) left &= left - 1;
        storage = window.start + __ffs((int)left) - 1;
    }
    return page_of(step, window, storage) * KEYS + storage % KEYS;
}

// Where the keys of a block lie: in a block of the pool, or (trees) each at a place of its own.
struct Source {
    const KvPool& pool;
    uint kv_head;
    KvBlock block;
    const uint* places;  // null: all in `block`

    // 16 bytes of K: dims 16 c of a group.
    SHARED uint4 key(uint digit, uint group, uint key) const {
        uint at = digit * PLANE + group * (KEYS * 64) + threadIdx.x % 4 * 16;
        if (ROWS > 1 || !places) return *(const uint4*)(block.codes + at + key * 64);
        uint place = places[key];
        return *(const uint4*)(kv_block(pool, place / KEYS, kv_head).codes + at + place % KEYS * 64);
    }

    // 16 bytes of V: the keys 8 t + 2 c + e of a dim, each at its place.
    SHARED uint4 value(uint digit, uint dim) const {
        uint at = (DIGITS + digit) * PLANE + dim * KEYS, c = threadIdx.x % 4;
        uint words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            uint place = places[8 * (i / 2) + 2 * c + i % 2];
            const schar* from = kv_block(pool, place / KEYS, kv_head).codes + at + value_slot(place % KEYS);
            words[i / 4] |= (uint) * (const uchar*)from << (8 * (i % 4));
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    // Queues the copy of all scales of a block into shared memory, by one warp.
    SHARED void take_scales(float* to) const {
        if (ROWS > 1 || !places) return copy_scales(to, block);
        for (uint i = threadIdx.x % 32; i < (GROUPS + 1) * KEYS; i += 32) {
            uint place = places[i % KEYS];
            to[i] = kv_block(pool, place / KEYS, kv_head).scales[i / KEYS * KEYS + place % KEYS];
        }
    }
};

// Tiles of 8 keys whose loads are in flight together.
#define TILES (4 / DIGITS)

// What the warps tell each other of their blocks, and what is copied ahead.
struct SpanRoom {
    uint weights[ROWS][SPAN_BLOCKS][2][32][4];
    Weighed parts[ROWS][SPAN_BLOCKS][8];
    uint places[SPAN_BLOCKS][KEYS];
    float scales[SPAN_BLOCKS][(GROUPS + 1) * KEYS];
    schar values[SPAN_BLOCKS][RING][DIGITS][SLICE];
};

// The rows of a block of threads.
struct Rows {
    uint count;
    uint index[ROWS];    // token index
    ulong vector[ROWS];  // of the lane: row * heads + head
};

// ROWS rows of a window from `first_row` on, as many as there are; `row` is the first.
SHARED Rows rows_of(const StepWindow& window, const StepRow& row, uint first_row, const AttentionShape& shape,
                    const Vectors& vectors) {
    Rows rows;
    rows.count = min((uint)ROWS, window.rows - first_row);
    // Vectors that are not there repeat one that is.
    uint head = vectors.head + min(threadIdx.x % 32 / 4, vectors.count - 1);
#pragma unroll
    for (uint i = 0; i < ROWS; i++) {
        rows.index[i] = row.index + i;
        rows.vector[i] = (ulong)(window.first + first_row + i) * shape.heads + head;
    }
    return rows;
}

// Scores of a block: s[row][2 t + e] of key 8 t + 2 c + e.
SHARED void score_block(float (&s)[ROWS][16], const Rows& rows, const Queries& queries, const Source& source,
                        const float* scales) {
    uint lane = threadIdx.x % 32, n = lane / 4, c = lane % 4;
    Query query;
    if (ROWS == 1) load_query(query, queries, rows.vector[0]);
#pragma unroll
    for (int first = 0; first < 8; first += TILES) {
        uint4 k[TILES][GROUPS][DIGITS];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
#pragma unroll
                for (int digit = 0; digit < DIGITS; digit++)
                    k[i][g][digit] = source.key(digit, g, 8 * (first + i) + n);
        if (first == 0) {
            wait_for_copies<RING - 1>();
            __syncwarp();
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (row >= rows.count) break;
            if (ROWS > 1) load_query(query, queries, rows.vector[row]);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                float score[2] = {0.0f, 0.0f};
#pragma unroll
                for (int g = 0; g < GROUPS; g++)
                    score_group(score, query, g, k[i][g],
                                *(const float2*)(scales + g * KEYS + 8 * (first + i) + 2 * c));
                s[row][2 * (first + i)] = score[0];
                s[row][2 * (first + i) + 1] = score[1];
            }
        }
    }
}

// Scores and weights of block `at` of the span, by warp `at`; `block` counts from the sequence's start.
SHARED void weigh_block(SpanRoom& room, uint at, uint block, const Source& source, const Rows& rows,
                        const Queries& queries, float scale) {
    uint lane = threadIdx.x % 32, c = lane % 4;
    float s[ROWS][16];
    score_block(s, rows, queries, source, room.scales[at]);
    auto value_scales = [&](int t) {
        return *(const float2*)(room.scales[at] + GROUPS * KEYS + 8 * t + 2 * c);
    };
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        if (row >= rows.count) break;
        uint w[2][4];
        Weighed part = weigh(s[row], scale, keys_seen(rows.index[row], block), value_scales, w);
        for (int j = 0; j < 2; j++)
            *(uint4*)room.weights[row][at][j][lane] = make_uint4(w[j][0], w[j][1], w[j][2], w[j][3]);
        if (c == 0) room.parts[row][at][lane / 4] = part;
    }
}

// A block's values for the dims of a warp into what is held.
SHARED void fold_block(float (&held)[ROWS][GROUPS][2], Fold (&fold)[ROWS], const SpanRoom& room, uint at,
                       uint block, const Rows& rows, const Source& source) {
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = lane / 4, c = lane % 4;
    uint4 v[GROUPS][DIGITS];
#pragma unroll
    for (int d = 0; d < GROUPS; d++)
#pragma unroll
        for (int digit = 0; digit < DIGITS; digit++)
            v[d][digit] =
                ROWS == 1 && source.places
                    ? source.value(digit, warp * (8 * GROUPS) + 8 * d + n)
                    : *(const uint4*)(room.values[warp][at % RING][digit] + (8 * d + n) * KEYS + c * 16);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        if (row >= rows.count || rows.index[row] < block * KEYS) continue;
        Weighed part = room.parts[row][at][n];
        Factors factors = admit(fold[row], part.max, part.sum);
        uint w[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint4 four = *(const uint4*)room.weights[row][at][j][lane];
            w[j][0] = four.x, w[j][1] = four.y, w[j][2] = four.z, w[j][3] = four.w;
        }
#pragma unroll
        for (int d = 0; d < GROUPS; d++) {
            float dot[2];
            value_dots(dot, w, v[d]);
#pragma unroll
            for (int e = 0; e < 2; e++)
                held[row][d][e] = folded(factors, held[row][d][e], dot[e] * part.unit);
        }
    }
}

// Grid [spans, tiles * rows_max / ROWS, windows], 256 threads, room for a SpanRoom: warp i scores block i of
// the span, then has GROUPS tiles of 8 dims of all of them.
extern "C" __global__ void __launch_bounds__(256)
    attention_spans(StepTables step, KvPool pool, AttentionShape shape, Queries queries, float* out,
                    Partial partial) {
    extern __shared__ __align__(16) uchar memory[];
    SpanRoom& room = *(SpanRoom*)memory;
    start_next_launch();
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = lane / 4;
    const StepWindow window = step.windows[shape.first_window + blockIdx.z];
    uint tiles = tiles_of(shape, pool), row_at = blockIdx.y / tiles * ROWS, first = blockIdx.x * SPAN_BLOCKS;
    uint first_row = shape.first_row + row_at;
    if (!is_small(window) || first_row >= window.rows) return wait_for_launches_before();
    Vectors vectors = vectors_of(shape, pool, blockIdx.y % tiles);
    StepRow row = step.rows[window.first + first_row];
    Rows rows = rows_of(window, row, first_row, shape, vectors);
    uint blocks = (row.index + rows.count - 1) / KEYS + 1;
    if (first >= blocks) return wait_for_launches_before();
    uint count = min((uint)SPAN_BLOCKS, blocks - first);
    auto source_of = [&](uint at) {
        bool gathers = window.tree && (first + at + 1) * KEYS > window.start;
        // The last row of the group may lie a page further than the first.
        uint page = page_of(step, window, min((first + at) * KEYS, row.storage + rows.count - 1));
        return Source{pool, vectors.kv_head, kv_block(pool, page, vectors.kv_head),
                      ROWS == 1 && gathers ? room.places[at] : nullptr};
    };
    // Before the launches before this one are done: pages are named, not read.
    for (uint at = 0; at < count; at++) {
        const schar* codes = source_of(at).block.codes;
        for (uint i = threadIdx.x * 128; i < 2 * DIGITS * PLANE; i += 256 * 128) prefetch(codes + i);
    }
    wait_for_launches_before();
    if (ROWS == 1 && window.tree && warp < count) {
        for (uint key = lane; key < KEYS; key += 32)
            room.places[warp][key] = tree_place(step, window, row, (first + warp) * KEYS + key);
        __syncwarp();
    }
    if (warp < count) source_of(warp).take_scales(room.scales[warp]);
    commit_copies();
    for (uint at = 0; at < RING - 1; at++) {
        if (at < count) copy_values(room.values[warp][at % RING], source_of(at).block);
        commit_copies();
    }
    if (warp < count) weigh_block(room, warp, first + warp, source_of(warp), rows, queries, shape.scale);
    __syncthreads();
    float held[ROWS][GROUPS][2];
    Fold fold[ROWS] = {};
    for (uint at = 0; at < count; at++) {
        uint next = at + RING - 1;
        if (next < count) copy_values(room.values[warp][next % RING], source_of(next).block);
        commit_copies();
        wait_for_copies<RING - 1>();
        __syncwarp();
        fold_block(held, fold, room, at, first + at, rows, source_of(at));
        __syncwarp();
    }
    if (n >= vectors.count) return;
#pragma unroll
    for (uint i = 0; i < ROWS; i++) {
        if (i >= rows.count || rows.index[i] < first * KEYS) continue;
        uint at = blockIdx.z * shape.rows_max + row_at + i;
        ulong part = part_at(shape, at, vectors.head + n, blockIdx.x);
        write_vector(held[i], fold[i], rows.index[i], out + rows.vector[i] * pool.head_dim, partial, part,
                     pool.head_dim);
    }
}

// Spans whose factors are ready at once.
#define FOLD_SPANS 256

// Largest value up to this thread's, of 256 threads; `tops`: 8 floats.
SHARED float running_max(float x, float* tops) {
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int h = 1; h < 32; h <<= 1) {
        float other = __shfl_up_sync(ALL_LANES, x, h);
        if (lane >= h && other > x) x = other;
    }
    if (lane == 31) tops[warp] = x;
    __syncthreads();
    for (uint i = 0; i < warp; i++) x = tops[i] > x ? tops[i] : x;
    return x;
}

// Grid [heads, rows_max, windows], 256 threads: thread j has dim j.
extern "C" __global__ void __launch_bounds__(256)
    attention_fold(StepTables step, KvPool pool, AttentionShape shape, float* out, Partial partial) {
    __shared__ float of_part[FOLD_SPANS], of_held[FOLD_SPANS], sums[FOLD_SPANS], tops[8], carried;
    start_next_launch();
    wait_for_launches_before();
    const StepWindow window = step.windows[shape.first_window + blockIdx.z];
    uint at = shape.first_row + blockIdx.y, head = blockIdx.x, t = threadIdx.x;
    if (is_small(window) == (shape.long_chains != 0) || at >= window.rows) return;
    uint spans = step.rows[window.first + at].index / (KEYS * SPAN_BLOCKS) + 1;
    if (spans == 1) return;
    ulong part = part_at(shape, blockIdx.z * shape.rows_max + blockIdx.y, head, 0);
    const float* values = partial.values + part * (64 * GROUPS) + t;
    float held = 0.0f, sum = 0.0f, top = NEGATIVE_INFINITY;
    for (uint first = 0; first < spans; first += FOLD_SPANS) {
        uint count = min((uint)FOLD_SPANS, spans - first);
        float2 own = t < count ? *(const float2*)(partial.folds + 2 * (part + first + t))
                               : make_float2(NEGATIVE_INFINITY, 0.0f);
        float now = running_max(own.x, tops);
        if (top > now) now = top;
        of_part[t] = now;
        __syncthreads();
        float before = t > 0 ? of_part[t - 1] : top;
        if (t == FOLD_SPANS - 1) carried = now;
        __syncthreads();
        of_part[t] = exp2_exact(own.x - now);
        of_held[t] = exp2_exact(before - now);
        sums[t] = own.y;
        __syncthreads();
        top = carried;
        if (t < 64 * GROUPS) {
#pragma unroll 8
            for (uint span = 0; span < count; span++) {
                float value = values[(ulong)(first + span) * (64 * GROUPS)];
                bool start = first + span == 0;
                Factors factors{of_part[span], of_held[span], start};
                held = folded(factors, held, value);
                sum = folded(factors, sum, sums[span]);
            }
        }
        __syncthreads();
    }
    float* to = out + ((ulong)(window.first + at) * shape.heads + head) * pool.head_dim;
    if (t < pool.head_dim) to[t] = held * DIVIDE(1.0f, sum);
}
