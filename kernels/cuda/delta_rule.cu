// The gated delta rule (crates/device/src/cpu/delta_rule.rs). A warp has the 4 columns of a unit (states.cuh) and
// walks the tokens of a window with the state in registers.
#include "states.cuh"

// Groups of 16 key indices, rounded up to a power of two, and the key dimension if it is exactly that (else 0):
// constants of the compilation.
#ifndef DELTA_STEPS
#define DELTA_STEPS 8
#define DELTA_KEY_DIM 128
#endif
#define FULL 0xffffffffu
// Longer windows are delta_scan's.
#define WINDOW_ROWS 32

// What a warp holds: STEPS groups of 16 key indices, two values of each. DK 0: the key dimension is pool.key_dim.
template <int STEPS>
struct Unit {
    float s[2 * STEPS];
};

// True if value 2 m + c of lane l is a key index.
template <int DK>
SHARED bool exists(uint key_dim, uint l, int m, int c) {
    return DK > 0 || l + 8 * c + 16 * m < key_dim;
}

template <int STEPS>
SHARED void load_unit(Unit<STEPS>& unit, const float* from) {
    uint lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < (2 * STEPS + 3) / 4; q++) {
        float4 x = *(const float4*)(from + (q * 32 + lane) * 4);
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * q + e < 2 * STEPS) unit.s[4 * q + e] = values[e];
    }
}

template <int STEPS>
SHARED void store_unit(const Unit<STEPS>& unit, float* to) {
    uint lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < (2 * STEPS + 3) / 4; q++) {
        float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * q + e < 2 * STEPS) values[e] = unit.s[4 * q + e];
        *(float4*)(to + (q * 32 + lane) * 4) = make_float4(values[0], values[1], values[2], values[3]);
    }
}

// The tree over 16 lanes, two of them here; all lanes of the column get the sum.
SHARED float tree_16(float low, float high) {
    float sum = low + high;
    sum = sum + __shfl_xor_sync(FULL, sum, 16);
    sum = sum + __shfl_xor_sync(FULL, sum, 8);
    return sum + __shfl_xor_sync(FULL, sum, 4);
}

// Adds the +0 products of key indices that do not exist.
template <int DK>
SHARED void pad_lanes(uint key_dim, uint l, int steps, float (&lane)[2]) {
    if (DK == 0)
        for (int c = 0; c < 2; c++)
            if (!exists<DK>(key_dim, l, steps - 1, c)) lane[c] = lane[c] + 0.0f;
}

// S *= g, and r = sum_16 of fma(S, k).
template <int STEPS, int DK>
SHARED float decay_and_recall(Unit<STEPS>& unit, const float (&k)[2 * STEPS], float g, uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
    float lane[2] = {0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (exists<DK>(key_dim, l, m, c)) {
                unit.s[2 * m + c] = unit.s[2 * m + c] * g;
                lane[c] = FMA(unit.s[2 * m + c], k[2 * m + c], lane[c]);
            }
    pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, lane);
    return tree_16(lane[0], lane[1]);
}

// S = fma(k, d, S).
template <int STEPS, int DK>
SHARED void update(Unit<STEPS>& unit, const float (&k)[2 * STEPS], float d, uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (exists<DK>(key_dim, l, m, c)) unit.s[2 * m + c] = FMA(k[2 * m + c], d, unit.s[2 * m + c]);
}

// sum_16 of fma(S, q).
template <int STEPS, int DK>
SHARED float read_out(const Unit<STEPS>& unit, const float (&q)[2 * STEPS], uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
    float lane[2] = {0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (exists<DK>(key_dim, l, m, c)) lane[c] = FMA(unit.s[2 * m + c], q[2 * m + c], lane[c]);
    pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, lane);
    return tree_16(lane[0], lane[1]);
}

// Loads a head's vector spread over the lanes of a column.
template <int STEPS, int DK>
SHARED void load_spread(float (&out)[2 * STEPS], const float* x, uint key_dim) {
    uint l = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            out[2 * m + c] = exists<DK>(key_dim, l, m, c) ? x[l + 8 * c + 16 * m] : 0.0f;
}

// x / sqrt(sum_16(x*x) + eps) * scale.
template <int STEPS>
SHARED void l2_normalize(float (&x)[2 * STEPS], float scale) {
    float lane[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) lane[i % 2] = FMA(x[i], x[i], lane[i % 2]);
    float r = DIVIDE(1.0f, __fsqrt_rn(tree_16(lane[0], lane[1]) + 1e-6f));
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) x[i] = (x[i] * r) * scale;
}

struct Gates {
    float g, beta;
};

SHARED Gates gates_of(float a, float b, float decay, float dt_bias) {
    return Gates{exp_exact(-(decay * softplus_exact(a + dt_bias))), sigmoid_exact(b)};
}

// What delta_step reads besides the state; by value.
struct DeltaInputs {
    const float* mixed;    // [rows, C], q, k and v blocks
    const float* a;        // [rows, Hv]
    const float* b;        // [rows, Hv]
    const float* decay;    // [Hv]
    const float* dt_bias;  // [Hv]
    float* out;            // [rows, Hv Dv]
    float q_scale;         // the f32 nearest to 1/sqrt(Dk)
};

// One token as a warp sees it.
template <int STEPS>
struct Token {
    float k[2 * STEPS], q[2 * STEPS];
    float v, g, beta;
};

template <int STEPS, int DK>
SHARED void load_token(Token<STEPS>& token, const DeltaPool& pool, const DeltaInputs& in, uint row, uint head,
                       uint column) {
    uint keys = pool.key_heads * pool.key_dim, key_head = head / (pool.value_heads / pool.key_heads);
    const float* mixed = in.mixed + (ulong)row * channels_of(pool);
    load_spread<STEPS, DK>(token.q, mixed + key_head * pool.key_dim, pool.key_dim);
    load_spread<STEPS, DK>(token.k, mixed + keys + key_head * pool.key_dim, pool.key_dim);
    token.v = column < pool.value_dim ? mixed[2 * keys + head * pool.value_dim + column] : 0.0f;
    uint at = row * pool.value_heads + head;
    Gates gates = gates_of(in.a[at], in.b[at], in.decay[head], in.dt_bias[head]);
    token.g = gates.g;
    token.beta = gates.beta;
    l2_normalize<STEPS>(token.q, in.q_scale);
    l2_normalize<STEPS>(token.k, 1.0f);
}

// Keeps what state_keep needs of a row.
template <int STEPS, int DK>
SHARED void keep_token(const Token<STEPS>& token, const DeltaPool& pool, uint place, uint row, uint head,
                       uint unit, uint column) {
    KeptRow kept = kept_row(pool, place, row);
    uint lane = threadIdx.x % 32, l = lane / 4, share = pool.value_heads / pool.key_heads;
    if (l == 0 && column < pool.value_dim) kept.values[head * pool.value_dim + column] = token.v;
    if (unit != 0 || lane % 4 != 0) return;
    if (l == 0) {
        kept.gates[head] = token.g;
        kept.gates[pool.value_heads + head] = token.beta;
    }
    if (head % share != 0) return;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
        if (exists<DK>(pool.key_dim, l, i / 2, i % 2))
            kept.keys[head / share * pool.key_dim + l + 8 * (i % 2) + 16 * (i / 2)] = token.k[i];
}

template <int STEPS, int DK>
SHARED float token_step(Unit<STEPS>& state, const Token<STEPS>& token, uint key_dim) {
    float r = decay_and_recall<STEPS, DK>(state, token.k, token.g, key_dim);
    float d = (token.v - r) * token.beta;
    update<STEPS, DK>(state, token.k, d, key_dim);
    return read_out<STEPS, DK>(state, token.q, key_dim);
}

// A tree row starts from its parent's state: the committed one, advanced along the path.
template <int STEPS, int DK>
SHARED void replay_path(Unit<STEPS>& state, const StepTables& step, const StepWindow& window,
                        const DeltaPool& pool, const DeltaInputs& in, uint row, uint head, uint unit, uint column) {
    load_unit<STEPS>(state, unit_at(pool, window.place, head, unit));
    uint ancestors = step.rows[window.first + row].ancestors & ~(1u << row);
    for (; ancestors != 0; ancestors &= ancestors - 1) {
        Token<STEPS> token;
        load_token<STEPS, DK>(token, pool, in, window.first + __ffs((int)ancestors) - 1, head, column);
        token_step<STEPS, DK>(state, token, pool.key_dim);
    }
}

template <int STEPS, int DK>
SHARED void step_window(const StepTables& step, const DeltaPool& pool, const DeltaInputs& in) {
    uint lane = threadIdx.x % 32, units = units_of(pool);
    uint at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const StepWindow window = step.windows[blockIdx.y];
    if (at >= pool.value_heads * units || window.rows > WINDOW_ROWS) return wait_for_launches_before();
    uint head = at / units, unit = at % units, column = unit * 4 + lane % 4;
    float* home = unit_at(pool, window.place, head, unit);
    Unit<STEPS> state;
    load_unit<STEPS>(state, home);
    wait_for_launches_before();
    int held = -1;  // the window row whose state is in registers
    for (uint row = 0; row < window.rows; row++) {
        if (window.tree && step.rows[window.first + row].parent != held)
            replay_path<STEPS, DK>(state, step, window, pool, in, row, head, unit, column);
        Token<STEPS> token;
        load_token<STEPS, DK>(token, pool, in, window.first + row, head, column);
        if (!window.commit) keep_token<STEPS, DK>(token, pool, window.place, row, head, unit, column);
        float o = token_step<STEPS, DK>(state, token, pool.key_dim);
        held = (int)row;
        if (lane < 4 && column < pool.value_dim)
            in.out[((ulong)(window.first + row) * pool.value_heads + head) * pool.value_dim + column] = o;
    }
    if (window.commit) store_unit<STEPS>(state, home);
}

// Small windows: grid [blocks of 8 units, windows], 256 threads.
extern "C" __global__ void __launch_bounds__(256) delta_window(StepTables step, DeltaPool pool, DeltaInputs in) {
    start_next_launch();
    step_window<DELTA_STEPS, DELTA_KEY_DIM>(step, pool, in);
}

// Long windows: delta_prepare normalizes keys and queries once, delta_scan walks the tokens.
struct Prepared {
    float* qk;     // [rows, Hk, 2, 16 STEPS], q then k, in the order of spread_at
    float* gates;  // [rows, Hv, 2], decay and beta
};

// Values that a lane loads at once.
template <int STEPS>
struct Spread {
    static const int WIDTH = STEPS == 1 ? 2 : 4;
};

// Place of value i of lane l.
template <int STEPS>
SHARED uint spread_at(uint l, uint i) {
    const uint w = Spread<STEPS>::WIDTH;
    return i / w * (8 * w) + l * w + i % w;
}

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
        if (inside)
#pragma unroll
            for (uint i = 0; i < 2 * STEPS; i++) out[spread_at<STEPS>(l, i)] = x[i];
    }
    for (uint head = threadIdx.x; head < pool.value_heads; head += blockDim.x) {
        uint at = row * pool.value_heads + head;
        Gates gates = gates_of(in.a[at], in.b[at], in.decay[head], in.dt_bias[head]);
        *(float2*)(to.gates + 2 * at) = make_float2(gates.g, gates.beta);
    }
}

SHARED void copy_async_4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

SHARED void copy_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

// Tokens of a stage, and stages in flight.
#define SCAN_TOKENS 8
#define SCAN_STAGES 3

// What a block of 8 units (32 columns of one head) needs of SCAN_TOKENS tokens.
template <int STEPS>
struct Stage {
    float qk[SCAN_TOKENS][2][16 * STEPS];
    float v[SCAN_TOKENS][32];
    float gates[SCAN_TOKENS][2];
};

template <int STEPS>
SHARED void load_stage(Stage<STEPS>& stage, const StepWindow& window, const DeltaPool& pool, const DeltaInputs& in,
                       const Prepared& from, uint head, uint column, uint first) {
    uint t = threadIdx.x, key_head = head / (pool.value_heads / pool.key_heads);
    const uint pieces = 2 * 16 * STEPS / 4;
    for (uint i = t; i < SCAN_TOKENS * pieces; i += 256) {
        uint token = i / pieces, row = window.first + first + token;
        if (first + token < window.rows)
            copy_async_16(&stage.qk[token][0][0] + i % pieces * 4,
                          from.qk + (ulong)(row * pool.key_heads + key_head) * (2 * 16 * STEPS) + i % pieces * 4);
    }
    uint token = t / 32, row = window.first + first + token;
    if (first + token < window.rows) {
        uint values = 2 * pool.key_heads * pool.key_dim + head * pool.value_dim;
        if (column + t % 32 < pool.value_dim)
            copy_async_4(&stage.v[token][t % 32],
                         in.mixed + (ulong)row * channels_of(pool) + values + column + t % 32);
        if (t % 32 < 2)
            copy_async_4(&stage.gates[token][t % 32], from.gates + 2 * (row * pool.value_heads + head) + t % 32);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int STEPS>
SHARED void read_spread(float (&out)[2 * STEPS], const float* x) {
    uint l = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i += Spread<STEPS>::WIDTH) {
        const float* at = x + spread_at<STEPS>(l, i);
        if (STEPS == 1) {
            float2 pair = *(const float2*)at;
            out[i] = pair.x, out[i + 1] = pair.y;
        } else {
            float4 four = *(const float4*)at;
            out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
        }
    }
}

// Reads the output of the token before (query q) and decays and recalls for this one (key k, decay g): the two
// sums wait for their trees together.
template <int STEPS, int DK>
SHARED void read_and_recall(Unit<STEPS>& unit, const float (&q)[2 * STEPS], const float (&k)[2 * STEPS], float g,
                            uint key_dim, float& o, float& r) {
    uint l = threadIdx.x % 32 / 4;
    float of_o[2] = {0.0f, 0.0f}, of_r[2] = {0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (exists<DK>(key_dim, l, m, c)) {
                of_o[c] = FMA(unit.s[2 * m + c], q[2 * m + c], of_o[c]);
                unit.s[2 * m + c] = unit.s[2 * m + c] * g;
                of_r[c] = FMA(unit.s[2 * m + c], k[2 * m + c], of_r[c]);
            }
    pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, of_o);
    pad_lanes<DK>(key_dim, l, (key_dim + 15) / 16, of_r);
    o = of_o[0] + of_o[1];
    r = of_r[0] + of_r[1];
#pragma unroll
    for (int h = 16; h >= 4; h >>= 1) {
        o = o + __shfl_xor_sync(FULL, o, h);
        r = r + __shfl_xor_sync(FULL, r, h);
    }
}

// Grid [blocks of 8 units of one head, windows], 256 threads.
template <int STEPS, int DK>
SHARED void scan_window(const StepTables& step, const DeltaPool& pool, const DeltaInputs& in, const Prepared& from) {
    __shared__ __align__(16) Stage<STEPS> stages[SCAN_STAGES];
    uint lane = threadIdx.x % 32, l = lane / 4, units = units_of(pool), blocks = (units + 7) / 8;
    uint head = blockIdx.x / blocks, first_unit = blockIdx.x % blocks * 8, unit = first_unit + threadIdx.x / 32;
    uint column = unit * 4 + lane % 4;
    const StepWindow window = step.windows[blockIdx.y];
    if (window.rows <= WINDOW_ROWS) return;
    bool inside = unit < units;
    float* home = unit_at(pool, window.place, head, inside ? unit : 0);
    Unit<STEPS> state;
    load_unit<STEPS>(state, home);
    for (uint s = 0; s < SCAN_STAGES - 1; s++)
        load_stage<STEPS>(stages[s], window, pool, in, from, head, first_unit * 4, s * SCAN_TOKENS);
    float q[2 * STEPS] = {}, k[2 * STEPS];
    float* out = in.out + ((ulong)window.first * pool.value_heads + head) * pool.value_dim + column;
    ulong stride = (ulong)pool.value_heads * pool.value_dim;
    bool writes = inside && column < pool.value_dim;
    float kept = 0.0f, o, r;
    for (uint at = 0; at < window.rows; at += SCAN_TOKENS) {
        asm volatile("cp.async.wait_group %0;" ::"n"(SCAN_STAGES - 2) : "memory");
        __syncthreads();
        load_stage<STEPS>(stages[(at / SCAN_TOKENS + SCAN_STAGES - 1) % SCAN_STAGES], window, pool, in, from, head,
                          first_unit * 4, at + (SCAN_STAGES - 1) * SCAN_TOKENS);
        const Stage<STEPS>& stage = stages[at / SCAN_TOKENS % SCAN_STAGES];
        uint tokens = min((uint)SCAN_TOKENS, window.rows - at);
        for (uint t = 0; t < tokens; t++) {
            read_spread<STEPS>(k, stage.qk[t][1]);
            read_and_recall<STEPS, DK>(state, q, k, stage.gates[t][0], pool.key_dim, o, r);
            update<STEPS, DK>(state, k, (stage.v[t][column % 32] - r) * stage.gates[t][1], pool.key_dim);
            read_spread<STEPS>(q, stage.qk[t][0]);
            // o is the output of token t - 1: lane l keeps token l of each 8 and writes when the next begin.
            if (t == 0) {
                if (l == SCAN_TOKENS - 1) kept = o;
                if (at > 0 && writes) out[(at - SCAN_TOKENS + l) * stride] = kept;
            } else if (l == t - 1) {
                kept = o;
            }
        }
    }
    uint tail = (window.rows - 1) % SCAN_TOKENS;
    o = read_out<STEPS, DK>(state, q, pool.key_dim);
    if (l == tail) kept = o;
    if (l <= tail && writes) out[(window.rows - 1 - tail + l) * stride] = kept;
    if (inside) store_unit<STEPS>(state, home);
}

extern "C" __global__ void __launch_bounds__(256) delta_prepare(DeltaPool pool, DeltaInputs in, Prepared to) {
    start_next_launch();
    wait_for_launches_before();
    prepare_row<DELTA_STEPS, DELTA_KEY_DIM>(pool, in, to);
}

extern "C" __global__ void __launch_bounds__(256)
delta_scan(StepTables step, DeltaPool pool, DeltaInputs in, Prepared from) {
    start_next_launch();
    wait_for_launches_before();
    scan_window<DELTA_STEPS, DELTA_KEY_DIM>(step, pool, in, from);
}

// A place of a layer that keeps rows of its last uncommitted window.
struct Keep {
    uint place;
    uint count;
    const uint* rows;
};

template <int STEPS, int DK>
SHARED void keep_units(const DeltaPool& pool, const Keep& job) {
    uint lane = threadIdx.x % 32, units = units_of(pool);
    uint at = blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= pool.value_heads * units) return;
    uint head = at / units, unit = at % units, column = unit * 4 + lane % 4;
    uint key_head = head / (pool.value_heads / pool.key_heads);
    float* home = unit_at(pool, job.place, head, unit);
    Unit<STEPS> state;
    load_unit<STEPS>(state, home);
    for (uint i = 0; i < job.count; i++) {
        KeptRow kept = kept_row(pool, job.place, job.rows[i]);
        float k[2 * STEPS];
        load_spread<STEPS, DK>(k, kept.keys + key_head * pool.key_dim, pool.key_dim);
        float v = column < pool.value_dim ? kept.values[head * pool.value_dim + column] : 0.0f;
        float r = decay_and_recall<STEPS, DK>(state, k, kept.gates[head], pool.key_dim);
        update<STEPS, DK>(state, k, (v - r) * kept.gates[pool.value_heads + head], pool.key_dim);
    }
    store_unit<STEPS>(state, home);
}

SHARED void keep_conv(const DeltaPool& pool, const Keep& job, uint block) {
    uint channel = block * 256 + threadIdx.x, c = channels_of(pool);
    if (channel >= c || pool.taps < 2) return;
    float* state = pool.conv + (ulong)job.place * (pool.taps - 1) * c + channel;
    for (uint i = 0; i < job.count; i++) {
        for (uint tap = 0; tap + 2 < pool.taps; tap++) state[tap * c] = state[(tap + 1) * c];
        state[(pool.taps - 2) * c] = kept_row(pool, job.place, job.rows[i]).conv[channel];
    }
}

// Places of layers; `words` of each is the place, a count, then that many rows.
struct KeepJobs {
    struct Job {
        DeltaPool pool;
        const uint* words;
    } jobs[32];
};

// Replays kept rows. Grid [blocks of 8 units, then blocks of 256 channels of the convolution; jobs], 256 threads. The
// next launch may read states before it waits, so it starts when this one ends.
extern "C" __global__ void __launch_bounds__(256) state_keep(const __grid_constant__ KeepJobs list) {
    wait_for_launches_before();
    const DeltaPool pool = list.jobs[blockIdx.y].pool;
    const uint* words = list.jobs[blockIdx.y].words;
    Keep job{words[0], words[1], words + 2};
    uint blocks = (pool.value_heads * units_of(pool) + 7) / 8;
    if (blockIdx.x < blocks)
        keep_units<DELTA_STEPS, DELTA_KEY_DIM>(pool, job);
    else
        keep_conv(pool, job, blockIdx.x - blocks);
}
