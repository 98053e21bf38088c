// The gated delta rule over long windows: delta_prepare normalizes keys and queries and makes the gates,
// delta_scan walks the tokens with the state in registers. conv_prompt.cu prepares one long window.
#include "delta_rule.cuh"

// Grid [rows], 256 threads: warps take pairs of key heads, q and k of each by a column of lanes. What the gates and
// the first pair need is asked for together.
template <int STEPS, int DK>
SHARED void prepare_row(const DeltaPool& pool, const DeltaInputs& in, const Prepared& to) {
    uint row = blockIdx.x, lane = threadIdx.x % 32, l = lane / 4, keys = pool.key_heads * pool.key_dim;
    const float* mixed = in.mixed + (ulong)row * channels_of(pool);
    uint pair = threadIdx.x / 32, pairs = (pool.key_heads + 1) / 2, is_key = lane % 2;
    float x[2 * STEPS];
    auto load = [&] {
        uint head = min(2 * pair + lane % 4 / 2, pool.key_heads - 1);
        load_spread<STEPS, DK>(x, mixed + is_key * keys + head * pool.key_dim, pool.key_dim);
    };
    float a, b, decay, dt_bias;
    uint gate = threadIdx.x;
    auto load_gate = [&] {
        uint head = min(gate, pool.value_heads - 1);
        a = in.a[row * pool.value_heads + head], b = in.b[row * pool.value_heads + head];
        decay = in.decay[head], dt_bias = in.dt_bias[head];
    };
    load_gate();
    if (pair < pairs) load();
    while (gate < pool.value_heads) {
        Gates gates = gates_of(a, b, decay, dt_bias);
        *(float2*)(to.gates + 2 * (row * pool.value_heads + gate)) = make_float2(gates.g, gates.beta);
        gate += blockDim.x;
        if (gate < pool.value_heads) load_gate();
    }
    while (pair < pairs) {
        uint head = 2 * pair + lane % 4 / 2;
        l2_normalize<STEPS>(x, is_key ? 1.0f : in.q_scale);
        float* out = to.qk + ((ulong)(row * pool.key_heads + head) * 2 + is_key) * 16 * STEPS;
        if (head < pool.key_heads) write_spread<STEPS>(x, out, l);
        pair += blockDim.x / 32;
        if (pair < pairs) load();
    }
}

SHARED void copy_async_4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}

SHARED void copy_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}

// A token costs four operations a value of the state, of which a lane of the card has 32: what matters is
// that little else stands between them. A thread has one of 8 threads' part of two columns, the first of which
// is its own: its recall is summed and its change found here, by half the warp for each column. While sums
// climb through the threads, the outputs of the token before are multiplied; parts of outputs go to shared
// memory, and a second warp beside each adds and writes them, and copies the tokens to come.

// Tokens of a stage, stages of the ring, threads that walk; as many carry. A stage's tokens are the body of
// one loop without a branch, as long as the instruction cache bears: twice as many take 238 ns each, not 133.
#define TOKENS (DELTA_STEPS <= 8 ? 8 : 4)
#define STAGES 3
#define THREADS 128
// Columns of a thread, in lanes 16 to 31 the second of a pair first.
#define COLUMNS 2

// What a block of 8 units (32 columns of one head) needs of a token.
template <int STEPS>
struct Token {
    float qk[2][16 * STEPS];
    float v[32];
    float gates[2];
    float pad[2];
};

// Parts of a token's outputs, two columns a lane of a warp, its own first. Eight words more, so that sums of
// several tokens are read from banks of their own.
struct Parts {
    float of[64 + 8];
};

// Parts of outputs of a warp and two stages in turn: the output before the stage's tokens, then theirs, of which
// the last one is made here in the last stage only.
struct Outputs {
    Parts of[2][TOKENS + 1];
};

template <int STEPS>
struct Memory {
    Token<STEPS> ring[STAGES * TOKENS];
    Outputs outputs[THREADS / 32];
};

// A block's columns: of `head`, from unit `first_unit` on.
struct Place {
    StepWindow window;
    uint head, first_unit;
};

// The sums of the parts of two columns, `pair` of four: the tree over 16 lanes, of which each thread added
// its two.
SHARED float2 sum_of_parts(const Parts& parts, uint pair) {
    float2 x[8];
#pragma unroll
    for (uint l = 0; l < 8; l++) {
        float2 two = *(const float2*)(parts.of + (l * 4 + pair) * 2);
        x[l] = l < 4 ? two : make_float2(two.y, two.x);
    }
#pragma unroll
    for (uint h = 4; h > 0; h /= 2)
#pragma unroll
        for (uint l = 0; l < h; l++) x[l] = make_float2(x[l].x + x[l + h].x, x[l].y + x[l + h].y);
    return x[0];
}

// Where the next stage's copies of a thread come from; strides count floats of a token.
struct Source {
    const float* qk;
    const float* v;
    const float* gates;
    uint qk_stride, v_stride, gates_stride;
    bool exists;  // the thread's column
};

// Queues the copies of a stage's tokens, of which `left` are there.
template <int STEPS, bool WHOLE>
SHARED void load_tokens(Token<STEPS>* stage, Source& from, uint left, uint thread) {
    // Of 16 bytes; tokens that the threads have at once.
    const uint pieces = 8 * STEPS, together = THREADS / pieces;
    Token<STEPS>* to = stage + thread / pieces;
#pragma unroll
    for (uint i = 0; i < TOKENS; i += together)
        if ((WHOLE && together <= TOKENS) || i + thread / pieces < left)
            copy_async_16(&to[i].qk[0][0] + thread % pieces * 4, from.qk + i * from.qk_stride);
    to = stage + thread / 32;
#pragma unroll
    for (uint i = 0; i < TOKENS; i += THREADS / 32)
        if (from.exists && (WHOLE || i + thread / 32 < left))
            copy_async_4(to[i].v + thread % 32, from.v + i * from.v_stride);
    if (thread < 2 * (WHOLE ? TOKENS : left)) copy_async_4(stage[thread / 2].gates + thread % 2, from.gates);
    from.qk += TOKENS * from.qk_stride;
    from.v += TOKENS * from.v_stride;
    from.gates += TOKENS * from.gates_stride;
}

template <int STEPS>
SHARED void load_stage(Token<STEPS>* stage, Source& from, uint left, uint thread) {
    if (left >= TOKENS)
        load_tokens<STEPS, true>(stage, from, TOKENS, thread);
    else
        load_tokens<STEPS, false>(stage, from, left, thread);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Carries tokens in and outputs out for the warp that has the same place among those that walk.
template <int STEPS>
SHARED void carry(Memory<STEPS>& memory, const DeltaPool& pool, const DeltaInputs& in, const Prepared& from,
                  const Place& place, uint thread) {
    const uint rows = place.window.rows, first = place.window.first, pieces = 8 * STEPS, lane = thread % 32;
    const uint key_head = place.head / (pool.value_heads / pool.key_heads);
    Source source;
    source.qk_stride = pool.key_heads * 2 * 16 * STEPS;
    source.v_stride = channels_of(pool);
    source.gates_stride = 2 * pool.value_heads;
    source.qk = from.qk + (ulong)(first + thread / pieces) * source.qk_stride + key_head * (2 * 16 * STEPS) +
                thread % pieces * 4;
    source.v = in.mixed + (ulong)(first + thread / 32) * source.v_stride + 2 * pool.key_heads * pool.key_dim +
               place.head * pool.value_dim + place.first_unit * 4 + lane;
    source.gates = from.gates + (ulong)(first + thread / 2) * source.gates_stride + 2 * place.head + thread % 2;
    source.exists = place.first_unit * 4 + lane < pool.value_dim;
    for (uint s = 0; s < STAGES - 1; s++)
        load_stage<STEPS>(memory.ring + s * TOKENS, source, rows - min(rows, s * TOKENS), thread);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    // Outputs: a lane has a pair of its warp's columns and one of 8 tokens.
    const uint column = place.first_unit * 4 + thread / 32 * 8 + lane % 4 * 2;
    const ulong stride = (ulong)pool.value_heads * pool.value_dim;
    float* out = in.out + first * stride + place.head * pool.value_dim + column;
    const Outputs& parts = memory.outputs[thread / 32];
    auto put = [&](uint row, const Parts& of) {
        const float2 sum = sum_of_parts(of, lane % 4);
        if (row < rows && column < pool.value_dim) out[row * stride] = sum.x;
        if (row < rows && column + 1 < pool.value_dim) out[row * stride + 1] = sum.y;
    };
    uint at = 0, turn = 0;
    for (;; at += TOKENS, turn++) {
        // The stage after this one is there too: its first token is read ahead.
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
        __syncthreads();
        if (at >= rows) break;
        load_stage<STEPS>(memory.ring + (turn + STAGES - 1) % STAGES * TOKENS, source,
                          rows - min(rows, at + (STAGES - 1) * TOKENS), thread);
        const uint i = lane / 4;
        if (turn > 0 && i < TOKENS) put(at - TOKENS + i - 1, parts.of[(turn - 1) % 2][i]);
    }
    for (uint i = lane / 4; i <= rows - (at - TOKENS); i += 8)
        put(at - TOKENS + i - 1, parts.of[(turn - 1) % 2][i]);
}

// A thread's walk: its lanes l and l + 8 of two columns after the token before, that token's query, and what
// it needs of this token but its query. Neighbouring threads have the same l: shared memory serves a warp's
// reads of 16 bytes in two turns then, else in four.
template <int STEPS>
struct Walk {
    Unit<STEPS> state[COLUMNS];
    float q[2 * STEPS], k[2 * STEPS];
    float2 gates;
    float v;
};

// Parts of the outputs for the query at hand.
template <int STEPS, int DK>
SHARED void output(const Walk<STEPS>& walk, Parts& to, uint key_dim, uint lane) {
    const uint l = lane / 4;
    float sum[COLUMNS][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (exists<DK>(key_dim, l, i / 2, i % 2))
                sum[c][i % 2] = FMA(walk.q[i], walk.state[c].s[i], sum[c][i % 2]);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, sum[c]);
    *(float2*)(to.of + lane * COLUMNS) = make_float2(sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]);
}

// What is loaded a token ahead. `pair`: of columns, the thread's of the block's.
template <int STEPS>
SHARED void read_ahead(Walk<STEPS>& walk, const Token<STEPS>& of, uint l, uint pair) {
    read_spread<STEPS>(walk.k, of.qk[1], l);
    walk.gates = *(const float2*)of.gates;
    walk.v = of.v[2 * pair + l / 4];
}

// The sum of the parts of the thread's own column: what the halves of a warp have of each other's columns is
// exchanged, then come two levels of the tree at once.
SHARED float climb(float own, float other) {
    own = own + __shfl_xor_sync(FULL, other, 16);
    const float a = __shfl_xor_sync(FULL, own, 8), b = __shfl_xor_sync(FULL, own, 4);
    const float c = __shfl_xor_sync(FULL, own, 12);
    return (own + a) + (b + c);
}

// A token, and the output of the token before. EARLY: what is loaded a token ahead is so before the output is
// put, where the next token is another turn of the loop and would wait for it.
template <int STEPS, int DK, bool EARLY>
SHARED void walk_token(Walk<STEPS>& walk, const Token<STEPS>& token, const Token<STEPS>& next, Parts& out,
                       uint key_dim, uint lane, uint pair) {
    const uint l = lane / 4;
    Unit<STEPS> decayed[COLUMNS];
    float part[COLUMNS];
#pragma unroll
    for (int c = COLUMNS - 1; c >= 0; c--) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            if (exists<DK>(key_dim, l, i / 2, i % 2)) {
                float s = walk.state[c].s[i] * walk.gates.x;
                decayed[c].s[i] = s;
                sum[i % 2] = FMA(walk.k[i], s, sum[i % 2]);
            }
        pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, sum);
        part[c] = sum[0] + sum[1];
    }
    const float r = climb(part[0], part[1]);
    Walk<STEPS> later = walk;
    if (EARLY) read_ahead<STEPS>(later, next, l, pair);
    output<STEPS, DK>(walk, out, key_dim, lane);
    if (!EARLY) read_ahead<STEPS>(later, next, l, pair);
    read_spread<STEPS>(later.q, token.qk[0], l);
    const float own = (walk.v - r) * walk.gates.y;
    const float d[COLUMNS] = {own, __shfl_xor_sync(FULL, own, 16)};
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            if (exists<DK>(key_dim, l, i / 2, i % 2))
                later.state[c].s[i] = FMA(walk.k[i], d[c], decayed[c].s[i]);
    walk = later;
}

template <int STEPS, int DK>
SHARED void walk_window(Memory<STEPS>& memory, const DeltaPool& pool, const Place& place, uint thread) {
    const uint lane = thread % 32, pair = thread / 32 * 4 + thread % 4;
    const uint units = units_of(pool), unit = place.first_unit + pair / 2;
    const uint unit_lane = lane / 4 * 4 + pair % 2 * 2;
    Outputs& parts = memory.outputs[thread / 32];
    Walk<STEPS> walk = {};
    float* home = unit_at(pool, place.window.place, place.head, min(unit, units - 1));
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) load_unit<STEPS>(walk.state[c], home, unit_lane + (lane / 16 ^ c));
    __syncthreads();
    read_ahead<STEPS>(walk, memory.ring[0], lane / 4, pair);
    const Token<STEPS>*tokens = memory.ring, *last_stage = memory.ring + (STAGES - 1) * TOKENS;
    Parts* out = parts.of[0];
    uint left = place.window.rows;
    auto step = [&](uint i, const Token<STEPS>* after) {
        const Token<STEPS>& next = i + 1 < TOKENS ? tokens[i + 1] : *after;
        if (i + 1 == TOKENS)
            walk_token<STEPS, DK, true>(walk, tokens[i], next, out[i], pool.key_dim, lane, pair);
        else
            walk_token<STEPS, DK, false>(walk, tokens[i], next, out[i], pool.key_dim, lane, pair);
    };
#pragma unroll 1
    for (; left > TOKENS; left -= TOKENS) {
        __syncthreads();
        const Token<STEPS>* after = tokens == last_stage ? memory.ring : tokens + TOKENS;
#pragma unroll
        for (uint i = 0; i < TOKENS; i++) step(i, after);
        tokens = after;
        out = out == parts.of[0] ? parts.of[1] : parts.of[0];
    }
    __syncthreads();
    // What is read ahead of the last token is of none.
#pragma unroll 1
    for (uint i = 0; i < left; i++) step(i, tokens);
    output<STEPS, DK>(walk, out[left], pool.key_dim, lane);
    __syncthreads();
    if (unit >= units) return;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) store_unit<STEPS>(walk.state[c], home, unit_lane + (lane / 16 ^ c));
}

// Grid [blocks of 8 units of one head, windows], 2 THREADS threads.
template <int STEPS, int DK>
SHARED void scan_window(const StepTables& step, const DeltaPool& pool, const DeltaInputs& in,
                        const Prepared& from) {
    __shared__ __align__(16) Memory<STEPS> memory;
    const uint blocks = (units_of(pool) + 7) / 8;
    Place place;
    place.window = step.windows[blockIdx.y];
    place.head = blockIdx.x / blocks;
    place.first_unit = blockIdx.x % blocks * 8;
    if (place.window.rows <= WINDOW_ROWS) return;
    // By a shuffle: the compiler sees that a warp does one or the other.
    if (__shfl_sync(FULL, threadIdx.x / THREADS, 0) == 0)
        walk_window<STEPS, DK>(memory, pool, place, threadIdx.x);
    else
        carry<STEPS>(memory, pool, in, from, place, threadIdx.x - THREADS);
}

// Long launches do not let the next one start early: its waiting blocks would take from theirs.
extern "C" __global__ void __launch_bounds__(256) delta_prepare(DeltaPool pool, DeltaInputs in, Prepared to) {
    wait_for_launches_before();
    prepare_row<DELTA_STEPS, DELTA_KEY_DIM>(pool, in, to);
}

extern "C" __global__ void __launch_bounds__(2 * THREADS, 1)
    delta_scan(StepTables step, DeltaPool pool, DeltaInputs in, Prepared from) {
    wait_for_launches_before();
    scan_window<DELTA_STEPS, DELTA_KEY_DIM>(step, pool, in, from);
}
