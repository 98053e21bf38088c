// The gated delta rule over small windows, and the replay of kept rows.
#include "delta_rule.cuh"

// 1: every window of the step has one row. Blocks need fewer registers then, and more of them load states
// at a time.
#ifndef ONE_ROW_WINDOWS
#define ONE_ROW_WINDOWS 0
#endif

// A row of a window as a block of 8 units (32 columns of a head) sees it.
template <int STEPS>
struct Row {
    float qk[2][16 * STEPS];  // normalized query and key, in the order of spread_at
    float v[32];
    float g, beta;
    float pad[2];
};

// Which units and rows a block has.
struct Place {
    StepWindow window;
    uint head, first_unit, key_head;
    bool first_of_head, first_of_key;
};

// Query and key of a row, by one warp: lanes 4 l + j take the query for even j and the key for odd.
template <int STEPS, int DK>
SHARED void prepare_keys(Row<STEPS>& to, const DeltaPool& pool, const DeltaInputs& in, const Place& place,
                         uint row) {
    uint lane = threadIdx.x % 32, l = lane / 4, is_key = lane % 2, keys = pool.key_heads * pool.key_dim;
    const float* mixed = in.mixed + (ulong)(place.window.first + row) * channels_of(pool);
    float x[2 * STEPS];
    load_spread<STEPS, DK>(x, mixed + is_key * keys + place.key_head * pool.key_dim, pool.key_dim);
    l2_normalize<STEPS>(x, is_key ? 1.0f : in.q_scale);
    if (lane % 4 < 2) write_spread<STEPS>(x, to.qk[is_key], l);
    if (place.window.commit || !place.first_of_key || lane % 4 != 1) return;
    float* kept = kept_row(pool, place.window.place, row).keys + place.key_head * pool.key_dim;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
        if (exists<DK>(pool.key_dim, l, i / 2, i % 2)) kept[l + 8 * (i % 2) + 16 * (i / 2)] = x[i];
}

// Values and gates of a row, by one warp.
template <int STEPS>
SHARED void prepare_values(Row<STEPS>& to, const DeltaPool& pool, const DeltaInputs& in, const Place& place,
                           uint row) {
    uint lane = threadIdx.x % 32, column = place.first_unit * 4 + lane, at = place.window.first + row;
    uint values = 2 * pool.key_heads * pool.key_dim + place.head * pool.value_dim;
    bool inside = column < pool.value_dim;
    float v = inside ? in.mixed[(ulong)at * channels_of(pool) + values + column] : 0.0f;
    ulong gate = (ulong)at * pool.value_heads + place.head;
    Gates gates = gates_of(in.a[gate], in.b[gate], in.decay[place.head], in.dt_bias[place.head]);
    to.v[lane] = v;
    if (lane == 0) to.g = gates.g, to.beta = gates.beta;
    if (place.window.commit) return;
    KeptRow kept = kept_row(pool, place.window.place, row);
    if (inside) kept.values[place.head * pool.value_dim + column] = v;
    if (lane == 0 && place.first_of_head) {
        kept.gates[place.head] = gates.g;
        kept.gates[pool.value_heads + place.head] = gates.beta;
    }
}

template <int STEPS, int DK>
SHARED float step_row(Unit<STEPS>& state, const Row<STEPS>& row, uint key_dim) {
    uint lane = threadIdx.x % 32, l = lane / 4, column = threadIdx.x / 32 * 4 + lane % 4;
    float k[2 * STEPS], q[2 * STEPS];
    read_spread<STEPS>(k, row.qk[1], l);
    float r = decay_and_recall<STEPS, DK>(state, k, row.g, key_dim);
    read_spread<STEPS>(q, row.qk[0], l);
    update<STEPS, DK>(state, k, (row.v[column] - r) * row.beta, key_dim);
    return read_out<STEPS, DK>(state, q, key_dim);
}

template <int STEPS, int DK>
SHARED void step_window(const StepTables& step, const DeltaPool& pool, const DeltaInputs& in,
                        Row<STEPS>* rows) {
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, units = units_of(pool), blocks = (units + 7) / 8;
    Place place;
    place.window = step.windows[blockIdx.y];
    const StepWindow& window = place.window;
    if (window.rows > WINDOW_ROWS) return wait_for_launches_before();
    place.head = blockIdx.x / blocks;
    place.first_unit = blockIdx.x % blocks * 8;
    uint share = pool.value_heads / pool.key_heads;
    place.key_head = place.head / share;
    place.first_of_head = place.first_unit == 0;
    place.first_of_key = place.first_of_head && place.head % share == 0;
    uint unit = place.first_unit + warp, column = unit * 4 + lane % 4;
    float* home = unit_at(pool, window.place, place.head, min(unit, units - 1));
    Unit<STEPS> state;
    load_unit<STEPS>(state, home);
    wait_for_launches_before();
    uint count = ONE_ROW_WINDOWS ? 1 : window.rows;
    for (uint job = warp; job < 2 * count; job += 8) {
        uint row = job / 2;
        if (job % 2 == 0)
            prepare_keys<STEPS, DK>(rows[row], pool, in, place, row);
        else
            prepare_values<STEPS>(rows[row], pool, in, place, row);
    }
    __syncthreads();
    float* out = in.out + ((ulong)window.first * pool.value_heads + place.head) * pool.value_dim + column;
    for (uint row = 0; row < count; row++) {
        // A tree row starts from its parent's state: the committed one, advanced along the path.
        if (!ONE_ROW_WINDOWS && window.tree && step.rows[window.first + row].parent != (int)row - 1) {
            load_unit<STEPS>(state, home);
            uint ancestors = step.rows[window.first + row].ancestors & ~(1u << row);
            for (; ancestors != 0; ancestors &= ancestors - 1)
                step_row<STEPS, DK>(state, rows[__ffs((int)ancestors) - 1], pool.key_dim);
        }
        float o = step_row<STEPS, DK>(state, rows[row], pool.key_dim);
        if (lane < 4 && column < pool.value_dim) out[(ulong)row * pool.value_heads * pool.value_dim] = o;
    }
    if (window.commit && unit < units) store_unit<STEPS>(state, home);
}

// Small windows: grid [blocks of 8 units of one head, windows], 256 threads, room for the rows of the longest
// window.
extern "C" __global__ void __launch_bounds__(256, DELTA_STEPS <= 8 ? (ONE_ROW_WINDOWS ? 4 : 3) : 1)
    delta_window(StepTables step, DeltaPool pool, DeltaInputs in) {
    extern __shared__ __align__(16) uchar memory[];
    start_next_launch();
    step_window<DELTA_STEPS, DELTA_KEY_DIM>(step, pool, in, (Row<DELTA_STEPS>*)memory);
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

// Replays kept rows. Grid [blocks of 8 units, then blocks of 256 channels of the convolution; jobs], 256
// threads. The next launch may read states before it waits, so it starts when this one ends.
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
