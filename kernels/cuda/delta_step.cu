// A delta-net layer's convolution, delta rule and gated norm of short windows in one launch: conv.cu,
// delta_rule.cu and rows.cu (gated_norm_heads) say what each does. A block has one value head of a window,
// a warp four of its columns, so everything from the convolution's inputs to the normed head stays inside.
// Blocks that share a key head each compute its convolution; the one that read its state last advances it.
#include "delta_rule.cuh"
#include "quantize.cuh"

// Taps of the convolution, a constant of the compilation.
#ifndef CONV_TAPS
#define CONV_TAPS 4
#endif
#define HISTORY (CONV_TAPS - 1)
// Longest window.
#define STEP_ROWS 8

struct StepInputs {
    const float* x;     // [rows, C]
    const float* taps;  // [C, taps]
    float* mixed;       // [rows, C], what conv gives
    const float* a;     // [rows, Hv]
    const float* b;
    const float* decay;    // [Hv]
    const float* dt_bias;  // [Hv]
    const float* z;        // [rows, Hv Dv]
    const float* weight;   // [Dv]
    float* out;            // [rows, Hv Dv]
    Codes codes;           // of out, or none
    uint* readers;         // [windows, Hk], zeros between launches
    float q_scale, eps;
};

// Shared memory of a block. `wide`: channels of a block, q and k of its key head, then v of its head.
struct StepRoom {
    float* history;  // [taps - 1, wide]
    float* taps;     // [wide, taps]
    float* raw;      // [rows, wide], after the convolution
    float* gate;     // [rows, Dv], silu(z)
    float* qk;       // [rows, 2, 16 DELTA_STEPS], normalized, as spread_at has them
    float* out;      // [rows, Dv]
    float* g_beta;   // [rows, 2]
};

struct StepPlace {
    StepWindow window;
    uint head, key_head, keys, wide, channels;
    bool first_of_key;
    // Channel of the layer that is channel `at` of the block.
    SHARED uint channel(const DeltaPool& pool, uint at) const {
        uint dim = pool.key_dim, all = pool.key_heads * dim;
        if (at < dim) return key_head * dim + at;
        if (at < 2 * dim) return all + key_head * dim + at - dim;
        return 2 * all + head * pool.value_dim + at - 2 * dim;
    }
};

// One output of the convolution, of row `row` of the window.
SHARED float conv_at(const StepTables& step, const StepPlace& place, const DeltaPool& pool,
                     const StepInputs& in, const StepRoom& room, uint row, uint at) {
    const StepWindow& window = place.window;
    const float* x = in.x + (ulong)window.first * place.channels + place.channel(pool, at);
    float input[CONV_TAPS];
    int from = (int)row, missing = 0;
#pragma unroll
    for (int back = 0; back < CONV_TAPS; back++) {
        if (from >= 0) {
            input[HISTORY - back] = x[(ulong)from * place.channels];
            from = window.tree ? step.rows[window.first + from].parent : from - 1;
        } else {
            missing++;
            input[HISTORY - back] = room.history[(HISTORY - missing) * place.wide + at];
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CONV_TAPS; i++) sum = FMA(room.taps[at * CONV_TAPS + i], input[i], sum);
    return silu_exact(sum);
}

// Decay and beta of a row.
SHARED void gate_row(const StepPlace& place, const DeltaPool& pool, const StepInputs& in,
                     const StepRoom& room, uint row) {
    uint at = (place.window.first + row) * pool.value_heads + place.head;
    Gates gates = gates_of(in.a[at], in.b[at], in.decay[place.head], in.dt_bias[place.head]);
    room.g_beta[2 * row] = gates.g, room.g_beta[2 * row + 1] = gates.beta;
    if (place.window.commit) return;
    float* kept = kept_row(pool, place.window.place, row).gates;
    kept[place.head] = gates.g, kept[pool.value_heads + place.head] = gates.beta;
}

// Convolution of all rows, silu of the norm's gate, and the rule's gates: all that waits for memory.
SHARED void convolve(const StepTables& step, const StepPlace& place, const DeltaPool& pool,
                     const StepInputs& in, const StepRoom& room) {
    uint wide = place.wide, dim = pool.value_dim, values = place.window.rows * (wide + dim);
    for (uint i = threadIdx.x; i < values + place.window.rows; i += blockDim.x) {
        if (i >= values) {
            gate_row(place, pool, in, room, i - values);
            continue;
        }
        uint row = i / (wide + dim), at = i % (wide + dim), of = place.window.first + row;
        if (at >= wide) {
            uint j = at - wide;
            ulong from = ((ulong)of * pool.value_heads + place.head) * dim + j;
            room.gate[row * dim + j] = silu_exact(in.z[from]);
            continue;
        }
        float y = conv_at(step, place, pool, in, room, row, at);
        room.raw[row * wide + at] = y;
        if (at < 2 * pool.key_dim && !place.first_of_key) continue;
        ulong to = (ulong)of * place.channels + place.channel(pool, at);
        in.mixed[to] = y;
        if (place.window.commit) continue;
        KeptRow kept = kept_row(pool, place.window.place, row);
        kept.conv[place.channel(pool, at)] = in.x[to];
        if (at >= 2 * pool.key_dim) kept.values[place.head * dim + at - 2 * pool.key_dim] = y;
    }
}

// Normalized query and key of a row, by two warps.
SHARED void prepare(const StepPlace& place, const DeltaPool& pool, const StepInputs& in, const StepRoom& room,
                    uint job) {
    uint row = job / 2, lane = threadIdx.x % 32, l = lane / 4, dim = pool.key_dim;
    const uint steps = DELTA_STEPS;
    uint is_key = job % 2;
    float x[2 * steps];
    load_spread<DELTA_STEPS, DELTA_KEY_DIM>(x, room.raw + row * place.wide + is_key * dim, dim);
    l2_normalize<DELTA_STEPS>(x, is_key ? 1.0f : in.q_scale);
    if (lane % 4 == 0) write_spread<DELTA_STEPS>(x, room.qk + (2 * row + is_key) * 16 * steps, l);
    if (place.window.commit || !is_key || !place.first_of_key || lane % 4 != 1) return;
    float* kept = kept_row(pool, place.window.place, row).keys + place.key_head * dim;
#pragma unroll
    for (int i = 0; i < 2 * DELTA_STEPS; i++)
        if (exists<DELTA_KEY_DIM>(dim, l, i / 2, i % 2)) kept[l + 8 * (i % 2) + 16 * (i / 2)] = x[i];
}

// One step of the rule on a warp's columns.
SHARED float rule_step(Unit<DELTA_STEPS>& state, const StepPlace& place, const DeltaPool& pool,
                       const StepRoom& room, uint row) {
    uint lane = threadIdx.x % 32, l = lane / 4, column = threadIdx.x / 32 * 4 + lane % 4;
    const float* qk = room.qk + 2 * row * 16 * DELTA_STEPS;
    float x[2 * DELTA_STEPS];
    read_spread<DELTA_STEPS>(x, qk + 16 * DELTA_STEPS, l);
    float g = room.g_beta[2 * row], beta = room.g_beta[2 * row + 1];
    float v = room.raw[row * place.wide + 2 * pool.key_dim + column];
    float r = decay_and_recall<DELTA_STEPS, DELTA_KEY_DIM>(state, x, g, pool.key_dim);
    update<DELTA_STEPS, DELTA_KEY_DIM>(state, x, (v - r) * beta, pool.key_dim);
    read_spread<DELTA_STEPS>(x, qk, l);
    return read_out<DELTA_STEPS, DELTA_KEY_DIM>(state, x, pool.key_dim);
}

// The gated norm of a row, by one warp: sum_256 of up to 128 values, four a lane.
SHARED void norm_row(const StepPlace& place, const DeltaPool& pool, const StepInputs& in,
                     const StepRoom& room, const float* weight, uint row) {
    uint lane = threadIdx.x % 32, dim = pool.value_dim;
    const float* x = room.out + row * dim;
    float square[4];
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        float value = lane + 32 * j < dim ? x[lane + 32 * j] : 0.0f;
        square[j] = FMA(value, value, 0.0f);
    }
    float sum = (square[0] + square[2]) + (square[1] + square[3]);
#pragma unroll
    for (uint h = 16; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(FULL, sum, h);
    float r = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(sum, (float)dim) + in.eps));
    uint at = 4 * lane, to = place.window.first + row, width = pool.value_heads * dim;
    float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (at < dim) {
#pragma unroll
        for (uint j = 0; j < 4; j++) y[j] = ((x[at + j] * r) * weight[j]) * room.gate[row * dim + at + j];
        *(float4*)(in.out + (ulong)to * width + place.head * dim + at) = make_float4(y[0], y[1], y[2], y[3]);
    }
    if (in.codes.codes) quantize_quad(y, to, at < dim ? place.head * dim + at : width, width, in.codes);
}

// Advances the convolution's states: of the head's values, and of the key head by the block that read it
// last.
SHARED void advance(const StepPlace& place, const DeltaPool& pool, const StepInputs& in, const StepRoom& room,
                    bool last) {
    const StepWindow& window = place.window;
    float* state = pool.conv + (ulong)window.place * HISTORY * place.channels;
    // Warps that prepare nothing, if there are some.
    uint busy = 64 * window.rows < blockDim.x ? 64 * window.rows : 0;
    if (threadIdx.x < busy) return;
    for (uint i = threadIdx.x - busy; i < HISTORY * place.wide; i += blockDim.x - busy) {
        uint tap = i / place.wide, at = i % place.wide, channel = place.channel(pool, at);
        if (at < 2 * pool.key_dim && !last) continue;
        int row = (int)(window.rows + tap) - HISTORY;
        state[tap * place.channels + channel] =
            row >= 0 ? in.x[(ulong)(window.first + row) * place.channels + channel]
                     : room.history[(tap + window.rows) * place.wide + at];
    }
}

SHARED StepRoom room_of(float* memory, const DeltaPool& pool, uint wide, uint rows) {
    StepRoom room;
    room.qk = memory;
    room.taps = room.qk + rows * 32 * DELTA_STEPS;
    room.history = room.taps + wide * CONV_TAPS;
    room.raw = room.history + HISTORY * wide;
    room.gate = room.raw + rows * wide;
    room.out = room.gate + rows * pool.value_dim;
    room.g_beta = room.out + rows * pool.value_dim;
    return room;
}

// Grid [value heads, windows], 8 value_dim threads (value_dim a multiple of 4, at most 128), room for
// `rows` rows, the most that a window has. The next launch may read states before it waits, but not these:
// a layer has its own.
extern "C" __global__ void __launch_bounds__(1024)
    delta_step(StepTables step, DeltaPool pool, const __grid_constant__ StepInputs in, uint rows) {
    extern __shared__ __align__(16) float memory[];
    __shared__ uint last;
    start_next_launch();
    StepPlace place;
    place.window = step.windows[blockIdx.y];
    const StepWindow& window = place.window;
    uint share = pool.value_heads / pool.key_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    place.head = blockIdx.x;
    place.key_head = place.head / share;
    place.first_of_key = place.head % share == 0;
    place.wide = 2 * pool.key_dim + pool.value_dim;
    place.channels = channels_of(pool);
    StepRoom room = room_of(memory, pool, place.wide, rows);
    float* home = unit_at(pool, window.place, place.head, warp);
    Unit<DELTA_STEPS> state;
    load_unit<DELTA_STEPS>(state, home);
    const float* conv = pool.conv + (ulong)window.place * HISTORY * place.channels;
    for (uint at = threadIdx.x; at < place.wide; at += blockDim.x) {
        uint channel = place.channel(pool, at);
#pragma unroll
        for (uint i = 0; i < CONV_TAPS; i++)
            room.taps[at * CONV_TAPS + i] = in.taps[(ulong)channel * CONV_TAPS + i];
#pragma unroll
        for (uint i = 0; i < HISTORY; i++)
            room.history[i * place.wide + at] = conv[i * place.channels + channel];
    }
    float weight[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint j = 0; j < 4; j++)
        if (4 * lane + j < pool.value_dim) weight[j] = in.weight[4 * lane + j];
    __syncthreads();
    wait_for_launches_before();
    // All of this block's reads of the state are done: their values lie in shared memory.
    uint before = 0;
    if (threadIdx.x == 0 && window.commit)
        before = atomicInc(in.readers + blockIdx.y * pool.key_heads + place.key_head, share - 1);
    convolve(step, place, pool, in, room);
    if (threadIdx.x == 0) last = before == share - 1;
    __syncthreads();
    for (uint job = warp; job < 2 * window.rows; job += blockDim.x / 32) prepare(place, pool, in, room, job);
    if (window.commit) advance(place, pool, in, room, last != 0);
    __syncthreads();
    for (uint row = 0; row < window.rows; row++) {
        // A tree row starts from its parent's state: the committed one, advanced along the path.
        if (window.tree && step.rows[window.first + row].parent != (int)row - 1) {
            load_unit<DELTA_STEPS>(state, home);
            uint ancestors = step.rows[window.first + row].ancestors & ~(1u << row);
            for (; ancestors != 0; ancestors &= ancestors - 1)
                rule_step(state, place, pool, room, __ffs((int)ancestors) - 1);
        }
        float o = rule_step(state, place, pool, room, row);
        if (lane < 4) room.out[row * pool.value_dim + warp * 4 + lane] = o;
    }
    // The states go out while the norm is made.
    if (window.commit) store_unit<DELTA_STEPS>(state, home);
    __syncthreads();
    for (uint row = warp; row < window.rows; row += blockDim.x / 32)
        norm_row(place, pool, in, room, weight, row);
}
