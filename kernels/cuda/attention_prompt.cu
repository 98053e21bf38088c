// Attention of long chains: a block of threads walks the keys with WARPS rows at a time.
#include "attention.cuh"

// Rows of a block, and blocks of keys that there is room for: with two, one is copied while the other is
// used.
#ifndef WARPS
#define WARPS 8
#define STAGES 2
#endif

// A block of a K/V head in shared memory.
struct Staged {
    schar codes[2 * DIGITS * PLANE];
    float scales[(GROUPS + 1) * KEYS];
};

struct PromptRoom {
    Staged stages[STAGES];
    // Values of the spans before, by thread.
    float held[GROUPS * 8][2][32 * WARPS];
};

SHARED void stage_block(Staged& to, const KvBlock& from) {
    for (uint i = threadIdx.x * 16; i < sizeof(to.codes); i += 32 * WARPS * 16)
        copy_async_16(to.codes + i, from.codes + i);
    for (uint i = threadIdx.x * 4; i < (GROUPS + 1) * KEYS; i += 32 * WARPS * 4)
        copy_async_16(to.scales + i, from.scales + i);
    commit_copies();
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
                k[digit] = *(const uint4*)(staged.codes + digit * PLANE + g * (KEYS * 64) + (8 * t + n) * 64 +
                                           c * 16);
            score_group(score, query, g, k, *(const float2*)(staged.scales + g * KEYS + 8 * t + 2 * c));
        }
        s[2 * t] = score[0];
        s[2 * t + 1] = score[1];
    }
    auto value_scales = [&](int t) {
        return *(const float2*)(staged.scales + GROUPS * KEYS + 8 * t + 2 * c);
    };
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

// Grid [row tiles of WARPS, tiles of heads, windows], 32 WARPS threads: a warp has 8 heads of one row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    attention_prompt(StepTables step, KvPool pool, AttentionShape shape, Queries queries, float* out) {
    extern __shared__ __align__(16) uchar memory[];
    PromptRoom& room = *(PromptRoom*)memory;
    // A long launch: the waiting blocks of the next would take from its own.
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
    // Vectors that are not there repeat one that is.
    ulong vector = (ulong)(window.first + min(at, window.rows - 1)) * shape.heads + vectors.head;
    ulong home = (vector + n) * pool.head_dim;
    auto block_at = [&](uint block) {
        return kv_block(pool, page_of(step, window, block * KEYS), vectors.kv_head);
    };
    stage_block(room.stages[0], block_at(0));
    Query query;
    load_query(query, queries, vector + min(n, vectors.count - 1));
    float part[GROUPS * 8][2];
    Fold fold{0.0f, 0.0f, false}, whole{0.0f, 0.0f, false};
    for (uint block = 0; block < blocks; block++) {
        wait_for_copies<0>();
        __syncthreads();
        if (STAGES == 2 && block + 1 < blocks)
            stage_block(room.stages[(block + 1) % STAGES], block_at(block + 1));
        if (index >= block * KEYS)
            prompt_block(part, fold, query, room.stages[block % STAGES], shape.scale,
                         keys_seen(index, block));
        if ((block + 1) % SPAN_BLOCKS == 0 || block + 1 == blocks) {
            if (fold.seen) fold_span(room, whole, part, fold);
            fold.seen = false;
        }
        if (STAGES == 1 && block + 1 < blocks) {
            __syncthreads();
            stage_block(room.stages[0], block_at(block + 1));
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
