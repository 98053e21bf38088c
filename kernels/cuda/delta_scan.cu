// The gated delta rule over long windows: delta_prepare normalizes keys and queries and makes the gates,
// delta_scan walks the tokens with the state in registers.
#include "delta_rule.cuh"

struct Prepared {
    float* qk;     // [rows, Hk, 2, 16 STEPS], q then k, in the order of spread_at
    float* gates;  // [rows, Hv, 2], decay and beta
};

// Grid [rows], 256 threads: warps take pairs of key heads, q and k of each by a column of lanes.
template <int STEPS, int DK>
SHARED void prepare_row(const DeltaPool& pool, const DeltaInputs& in, const Prepared& to) {
    uint row = blockIdx.x, lane = threadIdx.x % 32, l = lane / 4, keys = pool.key_heads * pool.key_dim;
    const float* mixed = in.mixed + (ulong)row * channels_of(pool);
    for (uint pair = threadIdx.x / 32; pair < (pool.key_heads + 1) / 2; pair += blockDim.x / 32) {
        uint head = 2 * pair + lane % 4 / 2, is_key = lane % 2;
        bool inside = head < pool.key_heads;
        float x[2 * STEPS];
        load_spread<STEPS, DK>(x, mixed + is_key * keys + (inside ? head : 0) * pool.key_dim, pool.key_dim);
        l2_normalize<STEPS>(x, is_key ? 1.0f : in.q_scale);
        float* out = to.qk + ((ulong)(row * pool.key_heads + head) * 2 + is_key) * 16 * STEPS;
        if (inside) write_spread<STEPS>(x, out, l);
    }
    for (uint head = threadIdx.x; head < pool.value_heads; head += blockDim.x) {
        uint at = row * pool.value_heads + head;
        Gates gates = gates_of(in.a[at], in.b[at], in.decay[head], in.dt_bias[head]);
        *(float2*)(to.gates + 2 * at) = make_float2(gates.g, gates.beta);
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

// Tokens of a stage, stages in flight, threads and units of a block (two of each warp: what it loads of keys
// and queries serves both).
#define TOKENS 8
#define STAGES (DELTA_STEPS <= 8 ? 4 : 2)
#define THREADS 128
#define PAIR 2

// What a block of 8 units (32 columns of one head) needs of TOKENS tokens.
template <int STEPS>
struct Stage {
    float qk[TOKENS][2][16 * STEPS];
    float v[TOKENS][32];
    float gates[TOKENS][2];
};

// The same in global memory, from the window's first token on; strides count floats of a token.
struct Source {
    const float* qk;
    const float* v;
    const float* gates;
    uint qk_stride, v_stride, gates_stride;
    uint columns;  // of 32
};

// Queues the copies of tokens first .. first + TOKENS - 1, as many as there are.
template <int STEPS>
SHARED void load_stage(Stage<STEPS>& stage, const Source& from, uint first, uint rows, uint thread) {
    const uint pieces = 8 * STEPS;
    uint count = first < rows ? min((uint)TOKENS, rows - first) : 0;
#pragma unroll
    for (uint i = 0; i < TOKENS * pieces; i += THREADS) {
        uint token = (i + thread) / pieces, piece = (i + thread) % pieces;
        if (token < count)
            copy_async_16(&stage.qk[token][0][0] + piece * 4,
                          from.qk + (ulong)(first + token) * from.qk_stride + piece * 4);
    }
#pragma unroll
    for (uint i = 0; i < TOKENS * 32; i += THREADS) {
        uint token = (i + thread) / 32, column = thread % 32;
        if (token < count && column < from.columns)
            copy_async_4(&stage.v[token][column], from.v + (ulong)(first + token) * from.v_stride + column);
    }
    if (thread < 2 * count)
        copy_async_4(&stage.gates[thread / 2][thread % 2],
                     from.gates + (ulong)(first + thread / 2) * from.gates_stride + thread % 2);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// A warp's walk: two units after the token before, that token's query, this token's key, and where the output of
// the token before goes. A lane with bit 2 of l writes the second unit's.
template <int STEPS>
struct Walk {
    Unit<STEPS> state[PAIR];
    float q[2 * STEPS], k[2 * STEPS];
    float* out;
    ulong stride;
    bool writes;
};

// The trees over 16 lanes of both units' sums, two lanes of each here: lanes without bit 2 of l get the first
// unit's, the others the second's.
template <int DK>
SHARED float trees_apart(float (&sum)[PAIR][2], uint key_dim, uint l) {
#pragma unroll
    for (int p = 0; p < PAIR; p++) pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, sum[p]);
    float first = sum[0][0] + sum[0][1], second = sum[1][0] + sum[1][1];
    bool upper = l & 4;
    float own = (upper ? second : first) + __shfl_xor_sync(FULL, upper ? first : second, 16);
    own = own + __shfl_xor_sync(FULL, own, 8);
    return own + __shfl_xor_sync(FULL, own, 4);
}

// The output of both units for a query; which lanes get which as trees_apart has it.
template <int STEPS, int DK>
SHARED float outputs(const Walk<STEPS>& walk, uint key_dim, uint l) {
    float sum[PAIR][2] = {};
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int p = 0; p < PAIR; p++)
                if (exists<DK>(key_dim, l, m, c))
                    sum[p][c] = FMA(walk.state[p].s[2 * m + c], walk.q[2 * m + c], sum[p][c]);
    return trees_apart<DK>(sum, key_dim, l);
}

// One token of a stage; writes the output of the token before, which is made while the sums of the recall wait for
// their trees. `next_key` is the next token's, loaded ahead; `column` of 32 is the first unit's.
template <int STEPS, int DK>
SHARED void walk_token(Walk<STEPS>& walk, const Stage<STEPS>& of, uint t, const float* next_key, uint key_dim,
                       uint l, uint column, bool first) {
    Unit<STEPS> decayed[PAIR];
    float next[2 * STEPS], sum[PAIR][2] = {}, r[PAIR];
    float2 gates = *(const float2*)of.gates[t];
    const float v[PAIR] = {of.v[t][column], of.v[t][column + 4]};
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int p = 0; p < PAIR; p++)
                if (exists<DK>(key_dim, l, m, c)) {
                    float s = walk.state[p].s[2 * m + c] * gates.x;
                    decayed[p].s[2 * m + c] = s;
                    sum[p][c] = FMA(s, walk.k[2 * m + c], sum[p][c]);
                }
#pragma unroll
    for (int p = 0; p < PAIR; p++) {
        pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, sum[p]);
        r[p] = tree_16(sum[p][0], sum[p][1]);
    }
    float o = outputs<STEPS, DK>(walk, key_dim, l);
    read_spread<STEPS>(next, next_key, l);
    read_spread<STEPS>(walk.q, of.qk[t][0], l);
    if (walk.writes && !first) *walk.out = o;
    walk.out += walk.stride;
#pragma unroll
    for (int p = 0; p < PAIR; p++) {
        float d = (v[p] - r[p]) * gates.y;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            if (exists<DK>(key_dim, l, i / 2, i % 2))
                walk.state[p].s[i] = FMA(walk.k[i], d, decayed[p].s[i]);
    }
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) walk.k[i] = next[i];
}

// Grid [blocks of 8 units of one head, windows], THREADS threads.
template <int STEPS, int DK>
SHARED void scan_window(const StepTables& step, const DeltaPool& pool, const DeltaInputs& in,
                        const Prepared& from) {
    __shared__ __align__(16) Stage<STEPS> stages[STAGES];
    uint thread = threadIdx.x, lane = thread % 32, l = lane / 4, units = units_of(pool),
         blocks = (units + 7) / 8;
    uint head = blockIdx.x / blocks, first_unit = blockIdx.x % blocks * 8,
         unit = first_unit + thread / 32 * PAIR;
    uint column = thread / 32 * 4 * PAIR + lane % 4, key_head = head / (pool.value_heads / pool.key_heads);
    const StepWindow window = step.windows[blockIdx.y];
    if (window.rows <= WINDOW_ROWS) return;
    Source source;
    source.qk_stride = pool.key_heads * 2 * 16 * STEPS;
    source.v_stride = channels_of(pool);
    source.gates_stride = 2 * pool.value_heads;
    source.qk = from.qk + (ulong)window.first * source.qk_stride + key_head * (2 * 16 * STEPS);
    source.v = in.mixed + (ulong)window.first * source.v_stride + 2 * pool.key_heads * pool.key_dim +
               head * pool.value_dim + first_unit * 4;
    source.gates = from.gates + (ulong)window.first * source.gates_stride + 2 * head;
    source.columns = min(32u, pool.value_dim - first_unit * 4);
    Walk<STEPS> walk = {};
    walk.stride = (ulong)pool.value_heads * pool.value_dim;
    uint own = column + (l & 4);
    // One token before the first.
    walk.out = in.out + window.first * walk.stride + head * pool.value_dim + first_unit * 4 + own - walk.stride;
    walk.writes = l % 4 == 0 && own < source.columns;
    float* home[PAIR];
#pragma unroll
    for (int p = 0; p < PAIR; p++) {
        home[p] = unit_at(pool, window.place, head, min(unit + p, units - 1));
        load_unit<STEPS>(walk.state[p], home[p]);
    }
    for (uint s = 0; s < STAGES - 1; s++)
        load_stage<STEPS>(stages[s], source, s * TOKENS, window.rows, thread);
    for (uint at = 0, turn = 0; at < window.rows; at += TOKENS, turn = (turn + 1) % STAGES) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load_stage<STEPS>(stages[(turn + STAGES - 1) % STAGES], source, at + (STAGES - 1) * TOKENS,
                          window.rows, thread);
        const Stage<STEPS>& stage = stages[turn];
        read_spread<STEPS>(walk.k, stage.qk[0][1], l);
        if (at + TOKENS <= window.rows) {
#pragma unroll
            for (uint t = 0; t < TOKENS; t++)
                walk_token<STEPS, DK>(walk, stage, t, stage.qk[min(t + 1, TOKENS - 1)][1], pool.key_dim, l,
                                      column, at + t == 0);
        } else {
            for (uint t = 0; t < window.rows - at; t++)
                walk_token<STEPS, DK>(walk, stage, t, stage.qk[min(t + 1, TOKENS - 1)][1], pool.key_dim, l,
                                      column, at + t == 0);
        }
    }
    float o = outputs<STEPS, DK>(walk, pool.key_dim, l);
    if (walk.writes) *walk.out = o;
#pragma unroll
    for (int p = 0; p < PAIR; p++)
        if (unit + p < units) store_unit<STEPS>(walk.state[p], home[p]);
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
