// The stage `attention`. Small windows and trees: attention_spans has a block of threads for every span of 512 keys,
// attention_fold joins them. Long chains: attention_prompt walks the keys with 8 rows at a time.
#include "attention.cuh"

// Longer chains are attention_prompt's.
#define SMALL_ROWS 16
#define WARPS 8

struct AttentionShape {
    uint heads;     // query heads
    uint spans;     // spans there is room for, per row and head
    uint rows_max;  // rows of the longest window that attention_spans takes
    float scale;    // the f32 nearest to log2(e)/sqrt(head_dim)
};

SHARED bool is_small(const StepWindow& window) { return window.rows <= SMALL_ROWS || window.tree; }

// Which vectors a block of threads has: 8 query heads of one K/V head and one row.
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

SHARED uint keys_seen(uint index, uint block) { return min((uint)KEYS, index + 1 - block * KEYS); }

SHARED void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Key `index` of a tree row as page * 64 + slot: ancestors lie at their own places. Keys that the row does not see
// are read from its own place.
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
        if (!places) return *(const uint4*)(block.codes + at + key * 64);
        uint place = places[key];
        return *(const uint4*)(kv_block(pool, place / KEYS, kv_head).codes + at + place % KEYS * 64);
    }

    // 16 bytes of V: the keys 8 t + 2 c + e of a dim.
    SHARED uint4 value(uint digit, uint dim) const {
        uint at = (DIGITS + digit) * PLANE + dim * KEYS, c = threadIdx.x % 4;
        if (!places) return *(const uint4*)(block.codes + at + c * 16);
        uint words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            uint place = places[8 * (i / 2) + 2 * c + i % 2];
            const schar* from = kv_block(pool, place / KEYS, kv_head).codes + at + value_slot(place % KEYS);
            words[i / 4] |= (uint)*(const uchar*)from << (8 * (i % 4));
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    // Scales of keys `key` and key + 1; group GROUPS is V's.
    SHARED float2 scales(uint group, uint key) const {
        if (!places) return *(const float2*)(block.scales + group * KEYS + key);
        uint a = places[key], b = places[key + 1];
        return make_float2(kv_block(pool, a / KEYS, kv_head).scales[group * KEYS + a % KEYS],
                           kv_block(pool, b / KEYS, kv_head).scales[group * KEYS + b % KEYS]);
    }
};

// Tiles of 8 keys whose loads are in flight together.
#define TILES (4 / DIGITS)

// Scores of a block: s[2 t + e] of key 8 t + 2 c + e.
SHARED void score_block(float (&s)[16], const Query& query, const Source& source) {
    uint lane = threadIdx.x % 32, n = lane / 4, c = lane % 4;
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
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            float score[2] = {0.0f, 0.0f};
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                score_group(score, query, g, k[i][g], source.scales(g, 8 * (first + i) + 2 * c));
            s[2 * (first + i)] = score[0];
            s[2 * (first + i) + 1] = score[1];
        }
    }
}

// What the warps of attention_spans tell each other of their blocks.
struct SpanRoom {
    uint weights[SPAN_BLOCKS][2][32][4];
    Weighed parts[SPAN_BLOCKS][8];
    uint places[SPAN_BLOCKS][KEYS];
};

// Scores and weights of block `at` of the span, by warp `at`.
SHARED void weigh_block(SpanRoom& room, uint at, const Source& source, const Query& query, float scale,
                        uint visible) {
    uint lane = threadIdx.x % 32, c = lane % 4;
    float s[16];
    uint w[2][4];
    score_block(s, query, source);
    auto value_scales = [&](int t) { return source.scales(GROUPS, 8 * t + 2 * c); };
    Weighed part = weigh(s, scale, visible, value_scales, w);
    for (int j = 0; j < 2; j++) *(uint4*)room.weights[at][j][lane] = make_uint4(w[j][0], w[j][1], w[j][2], w[j][3]);
    if (c == 0) room.parts[at][lane / 4] = part;
}

// Values of a block for the dims of a warp, 8 GROUPS of them.
struct Values {
    uint4 v[GROUPS][DIGITS];
};

SHARED void load_values(Values& values, const Source& source) {
    uint first = threadIdx.x / 32 * (8 * GROUPS) + threadIdx.x % 32 / 4;
#pragma unroll
    for (int d = 0; d < GROUPS; d++)
#pragma unroll
        for (int digit = 0; digit < DIGITS; digit++) values.v[d][digit] = source.value(digit, first + 8 * d);
}

SHARED void fold_block(float (&held)[GROUPS][2], Fold& fold, const SpanRoom& room, uint at, const Values& values) {
    uint lane = threadIdx.x % 32;
    Weighed part = room.parts[at][lane / 4];
    Factors factors = admit(fold, part.max, part.sum);
    uint w[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint4 four = *(const uint4*)room.weights[at][j][lane];
        w[j][0] = four.x, w[j][1] = four.y, w[j][2] = four.z, w[j][3] = four.w;
    }
#pragma unroll
    for (int d = 0; d < GROUPS; d++) {
        float dot[2];
        value_dots(dot, w, values.v[d]);
#pragma unroll
        for (int e = 0; e < 2; e++) held[d][e] = folded(factors, held[d][e], dot[e] * part.unit);
    }
}

// Partial results of attention_spans: values [rows, heads, spans, 64 GROUPS], then maxima and sums [.., 2].
struct Partial {
    float* values;
    float* folds;
};

// Place of a span's part; `row` counts rows_max per window.
SHARED ulong part_at(const AttentionShape& shape, uint row, uint head, uint span) {
    return ((ulong)row * shape.heads + head) * shape.spans + span;
}

// Grid [spans, tiles * rows_max, windows], 256 threads: warp i scores block i of the span, then has GROUPS tiles of
// 8 dims of all of them.
extern "C" __global__ void __launch_bounds__(256)
attention_spans(StepTables step, KvPool pool, AttentionShape shape, const float* q, float* out, Partial partial) {
    __shared__ __align__(16) SpanRoom room;
    start_next_launch();
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = lane / 4, c = lane % 4;
    const StepWindow window = step.windows[blockIdx.z];
    uint tiles = tiles_of(shape, pool), at = blockIdx.y / tiles, first = blockIdx.x * SPAN_BLOCKS;
    if (!is_small(window) || at >= window.rows) return wait_for_launches_before();
    const StepRow row = step.rows[window.first + at];
    uint blocks = row.index / KEYS + 1;
    if (first >= blocks) return wait_for_launches_before();
    uint count = min((uint)SPAN_BLOCKS, blocks - first);
    Vectors vectors = vectors_of(shape, pool, blockIdx.y % tiles);
    // Before the launches before this one are done: pages are named, not read.
    for (uint block = 0; block < count; block++) {
        KvBlock of = kv_block(pool, page_of(step, window, (first + block) * KEYS), vectors.kv_head);
        for (uint i = threadIdx.x * 128; i < 2 * DIGITS * PLANE; i += 256 * 128) prefetch(of.codes + i);
    }
    wait_for_launches_before();
    auto source_of = [&](uint block) {
        bool gathers = window.tree && (first + block + 1) * KEYS > window.start;
        KvBlock of = kv_block(pool, page_of(step, window, min((first + block) * KEYS, row.storage)), vectors.kv_head);
        return Source{pool, vectors.kv_head, of, gathers ? room.places[block] : nullptr};
    };
    if (warp < count) {
        if (window.tree)
            for (uint key = lane; key < KEYS; key += 32)
                room.places[warp][key] = tree_place(step, window, row, (first + warp) * KEYS + key);
        __syncwarp();
        Query query;
        ulong from = ((ulong)(window.first + at) * shape.heads + vectors.head + n) * pool.head_dim;
        load_query(query, n < vectors.count ? q + from : nullptr, pool.head_dim);
        weigh_block(room, warp, source_of(warp), query, shape.scale, keys_seen(row.index, first + warp));
    }
    Values values;
    if (!window.tree) load_values(values, source_of(0));
    __syncthreads();
    float held[GROUPS][2];
    Fold fold{0.0f, 0.0f, false};
    for (uint block = 0; block < count; block++) {
        if (window.tree) load_values(values, source_of(block));
        Values next;
        if (!window.tree && block + 1 < count) load_values(next, source_of(block + 1));
        fold_block(held, fold, room, block, values);
        values = next;
    }
    if (n >= vectors.count) return;
    bool whole = blocks <= SPAN_BLOCKS;
    ulong part = part_at(shape, blockIdx.z * shape.rows_max + at, vectors.head + n, blockIdx.x);
    float inverse = whole ? DIVIDE(1.0f, fold.sum) : 1.0f;
    float* to = whole ? out + ((ulong)(window.first + at) * shape.heads + vectors.head + n) * pool.head_dim
                      : partial.values + part * (64 * GROUPS);
    if (!whole && warp == 0 && c == 0) *(float2*)(partial.folds + 2 * part) = make_float2(fold.max, fold.sum);
#pragma unroll
    for (int d = 0; d < GROUPS; d++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint dim = (warp * GROUPS + d) * 8 + 2 * c + e;
            if (dim < pool.head_dim) to[dim] = whole ? held[d][e] * inverse : held[d][e];
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
    const StepWindow window = step.windows[blockIdx.z];
    uint at = blockIdx.y, head = blockIdx.x, t = threadIdx.x;
    if (!is_small(window) || at >= window.rows) return;
    uint spans = step.rows[window.first + at].index / (KEYS * SPAN_BLOCKS) + 1;
    if (spans == 1) return;
    ulong part = part_at(shape, blockIdx.z * shape.rows_max + at, head, 0);
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

SHARED void copy_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

// A block of a K/V head in shared memory.
struct Staged {
    schar codes[2 * DIGITS * PLANE];
    float scales[(GROUPS + 1) * KEYS];
};

struct PromptRoom {
    Staged stages[2];
    // Values of the spans before, by thread.
    float held[GROUPS * 8][2][32 * WARPS];
};

SHARED void stage_block(Staged& to, const KvBlock& from) {
    for (uint i = threadIdx.x * 16; i < sizeof(to.codes); i += 32 * WARPS * 16)
        copy_async_16(to.codes + i, from.codes + i);
    for (uint i = threadIdx.x * 4; i < (GROUPS + 1) * KEYS; i += 32 * WARPS * 4)
        copy_async_16(to.scales + i, from.scales + i);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// One staged block into the values of the span.
SHARED void prompt_block(float (&part)[GROUPS * 8][2], Fold& fold, const Query& query, const Staged& staged,
                         float scale, uint visible) {
    uint lane = threadIdx.x % 32, n = lane / 4, c = lane % 4;
    float s[16];
    uint w[2][4];
#pragma unroll
    for (int t = 0; t < 8; t++) {
        float score[2] = {0.0f, 0.0f};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            uint4 k[DIGITS];
#pragma unroll
            for (int digit = 0; digit < DIGITS; digit++)
                k[digit] = *(const uint4*)(staged.codes + digit * PLANE + g * (KEYS * 64) + (8 * t + n) * 64 + c * 16);
            score_group(score, query, g, k, *(const float2*)(staged.scales + g * KEYS + 8 * t + 2 * c));
        }
        s[2 * t] = score[0];
        s[2 * t + 1] = score[1];
    }
    auto value_scales = [&](int t) { return *(const float2*)(staged.scales + GROUPS * KEYS + 8 * t + 2 * c); };
    Weighed weighed = weigh(s, scale, visible, value_scales, w);
    Factors factors = admit(fold, weighed.max, weighed.sum);
#pragma unroll
    for (int d = 0; d < GROUPS * 8; d++) {
        uint4 v[DIGITS];
#pragma unroll
        for (int digit = 0; digit < DIGITS; digit++)
            v[digit] = *(const uint4*)(staged.codes + (DIGITS + digit) * PLANE + (8 * d + n) * KEYS + c * 16);
        float dot[2];
        value_dots(dot, w, v);
#pragma unroll
        for (int e = 0; e < 2; e++) part[d][e] = folded(factors, part[d][e], dot[e] * weighed.unit);
    }
}

// Takes a span into what is held.
SHARED void fold_span(PromptRoom& room, Fold& whole, const float (&part)[GROUPS * 8][2], const Fold& fold) {
    Factors factors = admit(whole, fold.max, fold.sum);
#pragma unroll
    for (int d = 0; d < GROUPS * 8; d++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float& held = room.held[d][e][threadIdx.x];
            held = folded(factors, held, part[d][e]);
        }
}

// Grid [row tiles of 8, tiles of heads, windows], 256 threads: a warp has 8 heads of one row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_prompt(StepTables step, KvPool pool, AttentionShape shape, const float* q, float* out) {
    extern __shared__ __align__(16) uchar memory[];
    PromptRoom& room = *(PromptRoom*)memory;
    start_next_launch();
    wait_for_launches_before();
    uint lane = threadIdx.x % 32, n = lane / 4, c = lane % 4;
    const StepWindow window = step.windows[blockIdx.z];
    // The longest first.
    uint first = (gridDim.x - 1 - blockIdx.x) * WARPS;
    if (is_small(window) || first >= window.rows) return;
    uint at = first + threadIdx.x / 32, index = window.start + at;
    uint blocks = (window.start + min(first + WARPS, window.rows) - 1) / KEYS + 1;
    Vectors vectors = vectors_of(shape, pool, blockIdx.y);
    bool there = at < window.rows && n < vectors.count;
    ulong home = ((ulong)(window.first + at) * shape.heads + vectors.head + n) * pool.head_dim;
    auto block_at = [&](uint block) {
        return kv_block(pool, page_of(step, window, block * KEYS), vectors.kv_head);
    };
    stage_block(room.stages[0], block_at(0));
    Query query;
    load_query(query, there ? q + home : nullptr, pool.head_dim);
    float part[GROUPS * 8][2];
    Fold fold{0.0f, 0.0f, false}, whole{0.0f, 0.0f, false};
    for (uint block = 0; block < blocks; block++) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (block + 1 < blocks) stage_block(room.stages[(block + 1) % 2], block_at(block + 1));
        if (index >= block * KEYS)
            prompt_block(part, fold, query, room.stages[block % 2], shape.scale, keys_seen(index, block));
        if ((block + 1) % SPAN_BLOCKS == 0 || block + 1 == blocks) {
            if (fold.seen) fold_span(room, whole, part, fold);
            fold.seen = false;
        }
    }
    if (!there) return;
    float inverse = DIVIDE(1.0f, whole.sum);
#pragma unroll
    for (int d = 0; d < GROUPS * 8; d++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint dim = 8 * d + 2 * c + e;
            if (dim < pool.head_dim) out[home + dim] = room.held[d][e][threadIdx.x] * inverse;
        }
}
