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

// Tokens of a stage, stages of the ring, threads of a block. A thread has what two lanes of a unit hold, l = t and
// l = t + 4 of a column, so that two of the four levels of a tree lie within a thread: the latency of the others is
// most of what a token costs beyond its multiply-adds.
#define TOKENS (DELTA_STEPS <= 8 ? 8 : 4)
#define STAGES 4
#define THREADS 128
#define HALVES 2

// What a block of 8 units (32 columns of one head) needs of a token.
template <int STEPS>
struct Token {
    float qk[2][16 * STEPS];
    float v[32];
    float gates[2];
    float pad[2];
};

template <int STEPS>
struct Stage {
    Token<STEPS> tokens[TOKENS];
};

// Where the next stage's copies of a thread come from; strides count floats of a token.
struct Source {
    const float* qk;
    const float* v;
    const float* gates;
    uint qk_stride, v_stride, gates_stride;
    uint columns;  // of 32
};

// Queues the copies of the next stage's tokens, of which `left` are there.
template <int STEPS>
SHARED void load_stage(Stage<STEPS>& stage, Source& from, uint left, uint thread) {
    const uint pieces = 8 * STEPS, count = min(left, (uint)TOKENS);
    const float *qk = from.qk, *v = from.v;
    Token<STEPS>* to = stage.tokens + thread / pieces;
#pragma unroll
    for (uint i = 0; i < TOKENS; i += THREADS / pieces, qk += THREADS / pieces * (ulong)from.qk_stride)
        if (i + thread / pieces < count) copy_async_16(&to[i].qk[0][0] + thread % pieces * 4, qk);
    to = stage.tokens + thread / 32;
#pragma unroll
    for (uint i = 0; i < TOKENS; i += THREADS / 32, v += THREADS / 32 * (ulong)from.v_stride)
        if (i + thread / 32 < count && thread % 32 < from.columns) copy_async_4(to[i].v + thread % 32, v);
    if (thread < 2 * count)
        copy_async_4(stage.tokens[thread / 2].gates + thread % 2, from.gates);
    asm volatile("cp.async.commit_group;" ::: "memory");
    from.qk += TOKENS * (ulong)from.qk_stride;
    from.v += TOKENS * (ulong)from.v_stride;
    from.gates += TOKENS * from.gates_stride;
}

// A thread's walk: its part of a column after the token before, that token's query, what it needs of this token
// but its query, and where the output of the token before goes.
template <int STEPS>
struct Walk {
    Unit<STEPS> state[HALVES];
    float q[HALVES][2 * STEPS], k[HALVES][2 * STEPS];
    float2 gates;
    float v;
    float* out;
    ulong stride;
    bool writes;
};

// The tree over 16 lanes, four of them here (t + 4 h + 8 c); all threads of the column get the sum.
template <int DK>
SHARED float tree_of_four(float (&sum)[HALVES][2], uint key_dim, uint t) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) pad_lanes<DK>(key_dim, t + 4 * h, (key_dim + 15) / 16, sum[h]);
    float own = (sum[0][0] + sum[0][1]) + (sum[1][0] + sum[1][1]);
    own = own + __shfl_xor_sync(FULL, own, 16);
    return own + __shfl_xor_sync(FULL, own, 8);
}

template <int STEPS>
SHARED void read_halves(float (&to)[HALVES][2 * STEPS], const float* from, uint t) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) read_spread<STEPS>(to[h], from, t + 4 * h);
}

// The output for the query at hand.
template <int STEPS, int DK>
SHARED float output(const Walk<STEPS>& walk, uint key_dim, uint t) {
    float sum[HALVES][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            if (exists<DK>(key_dim, t + 4 * h, i / 2, i % 2))
                sum[h][i % 2] = FMA(walk.state[h].s[i], walk.q[h][i], sum[h][i % 2]);
    return tree_of_four<DK>(sum, key_dim, t);
}

// What is loaded a token ahead.
template <int STEPS>
SHARED void read_ahead(Walk<STEPS>& walk, const Token<STEPS>& of, uint t, uint column) {
    read_halves<STEPS>(walk.k, of.qk[1], t);
    walk.gates = *(const float2*)of.gates;
    walk.v = of.v[column];
}

// A token; writes the output of the token before, which is made while the sum of the recall waits for its tree.
template <int STEPS, int DK>
SHARED void walk_token(Walk<STEPS>& walk, const Token<STEPS>& token, const Token<STEPS>& next, uint key_dim, uint t,
                       uint column, bool first) {
    Unit<STEPS> decayed[HALVES];
    float sum[HALVES][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            if (exists<DK>(key_dim, t + 4 * h, i / 2, i % 2)) {
                float s = walk.state[h].s[i] * walk.gates.x;
                decayed[h].s[i] = s;
                sum[h][i % 2] = FMA(s, walk.k[h][i], sum[h][i % 2]);
            }
    float r = tree_of_four<DK>(sum, key_dim, t);
    float o = output<STEPS, DK>(walk, key_dim, t);
    Walk<STEPS> later = walk;
    read_ahead<STEPS>(later, next, t, column);
    read_halves<STEPS>(later.q, token.qk[0], t);
    if (walk.writes && !first) *walk.out = o;
    later.out += walk.stride;
    float d = (walk.v - r) * walk.gates.y;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            if (exists<DK>(key_dim, t + 4 * h, i / 2, i % 2))
                later.state[h].s[i] = FMA(walk.k[h][i], d, decayed[h].s[i]);
    walk = later;
}

// Grid [blocks of 8 units of one head, windows], THREADS threads.
template <int STEPS, int DK>
SHARED void scan_window(const StepTables& step, const DeltaPool& pool, const DeltaInputs& in,
                        const Prepared& from) {
    __shared__ __align__(16) Stage<STEPS> stages[STAGES];
    uint thread = threadIdx.x, t = thread % 32 / 8, units = units_of(pool), blocks = (units + 7) / 8;
    uint head = blockIdx.x / blocks, first_unit = blockIdx.x % blocks * 8;
    uint column = thread / 32 * 8 + thread % 8, unit = first_unit + column / 4;
    uint key_head = head / (pool.value_heads / pool.key_heads);
    const StepWindow window = step.windows[blockIdx.y];
    const uint rows = window.rows, pieces = 8 * STEPS;
    if (rows <= WINDOW_ROWS) return;
    Source source;
    source.qk_stride = pool.key_heads * 2 * 16 * STEPS;
    source.v_stride = channels_of(pool);
    source.gates_stride = 2 * pool.value_heads;
    source.qk = from.qk + (ulong)(window.first + thread / pieces) * source.qk_stride + key_head * (2 * 16 * STEPS) +
                thread % pieces * 4;
    source.v = in.mixed + (ulong)(window.first + thread / 32) * source.v_stride +
               2 * pool.key_heads * pool.key_dim + head * pool.value_dim + first_unit * 4 + thread % 32;
    source.gates = from.gates + (ulong)(window.first + thread / 2) * source.gates_stride + 2 * head + thread % 2;
    source.columns = min(32u, pool.value_dim - first_unit * 4);
    Walk<STEPS> walk = {};
    walk.stride = (ulong)pool.value_heads * pool.value_dim;
    // One token before the first.
    walk.out = in.out + window.first * walk.stride + head * pool.value_dim + first_unit * 4 + column - walk.stride;
    walk.writes = t == 0 && column < source.columns;
    float* home = unit_at(pool, window.place, head, min(unit, units - 1));
#pragma unroll
    for (int h = 0; h < HALVES; h++) load_unit<STEPS>(walk.state[h], home, 4 * (t + 4 * h) + column % 4);
    for (uint s = 0; s < STAGES - 1; s++)
        load_stage<STEPS>(stages[s], source, rows - min(rows, s * TOKENS), thread);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    read_ahead<STEPS>(walk, stages[0].tokens[0], t, column);
    for (uint at = 0, turn = 0; at < rows; at += TOKENS, turn = (turn + 1) % STAGES) {
        // The stage after this one is there too: its first token is read ahead.
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
        __syncthreads();
        const uint loaded = at + (STAGES - 1) * TOKENS;
        load_stage<STEPS>(stages[(turn + STAGES - 1) % STAGES], source, rows - min(rows, loaded), thread);
        const Token<STEPS>* tokens = stages[turn].tokens;
        const Token<STEPS>* after = stages[(turn + 1) % STAGES].tokens;
        if (at + TOKENS <= rows) {
#pragma unroll
            for (uint i = 0; i < TOKENS; i++)
                walk_token<STEPS, DK>(walk, tokens[i], i + 1 < TOKENS ? tokens[i + 1] : *after, pool.key_dim, t,
                                      column, at + i == 0);
        } else {
            for (uint i = 0; i < rows - at; i++)
                walk_token<STEPS, DK>(walk, tokens[i], i + 1 < TOKENS ? tokens[i + 1] : *after, pool.key_dim, t,
                                      column, at + i == 0);
        }
    }
    float o = output<STEPS, DK>(walk, pool.key_dim, t);
    if (walk.writes) *walk.out = o;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
        if (unit < units) store_unit<STEPS>(walk.state[h], home, 4 * (t + 4 * h) + column % 4);
}

// Long launches do not let the next one start early: its waiting blocks would take from theirs.
extern "C" __global__ void __launch_bounds__(256) delta_prepare(DeltaPool pool, DeltaInputs in, Prepared to) {
    wait_for_launches_before();
    prepare_row<DELTA_STEPS, DELTA_KEY_DIM>(pool, in, to);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_scan(StepTables step, DeltaPool pool, DeltaInputs in, Prepared from) {
    wait_for_launches_before();
    scan_window<DELTA_STEPS, DELTA_KEY_DIM>(step, pool, in, from);
}
