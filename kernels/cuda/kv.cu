// Quantizing K/V into pages, and keeping a tree's path (crates/device/src/cpu/kv.rs).
#include "kv.cuh"

// Grid [rows], 32 threads for each half of each K/V head: k heads, then v heads.
extern "C" __global__ void kv_append(StepTables step, KvPool pool, const float* k, const float* v) {
    start_next_launch();
    wait_for_launches_before();
    const StepRow row = step.rows[blockIdx.x];
    uint page = page_of(step, step.windows[row.window], row.storage);
    for (uint half = threadIdx.x / 32; half < 2 * pool.kv_heads; half += blockDim.x / 32) {
        bool is_value = half >= pool.kv_heads;
        uint head = is_value ? half - pool.kv_heads : half;
        KvBlock block = kv_block(pool, page, head);
        const float* from = (is_value ? v : k) + ((ulong)blockIdx.x * pool.kv_heads + head) * pool.head_dim;
        float x[HEAD_VALUES];
        load_head(x, from, pool.head_dim);
        if (is_value)
            store_value(x, pool, block, row.storage % KEYS);
        else
            store_key(x, pool, block, row.storage % KEYS);
    }
}

// Layers that move keys; `words` of each is a count, then pairs (from, to) of page * 64 + slot, in order.
struct KeepJobs {
    struct Job {
        KvPool pool;
        const uint* words;
    } jobs[32];
};

// Grid [K/V heads of the layer with most, jobs].
extern "C" __global__ void __launch_bounds__(256) kv_keep(const __grid_constant__ KeepJobs list) {
    start_next_launch();
    wait_for_launches_before();
    const KvPool pool = list.jobs[blockIdx.y].pool;
    const uint* words = list.jobs[blockIdx.y].words;
    if (blockIdx.x >= pool.kv_heads) return;
    uint plane = plane_of(pool), dims = pool.groups * 64;
    for (uint move = 0; move < words[0]; move++) {
        uint from = words[1 + 2 * move], to = words[2 + 2 * move];
        if (from == to) continue;
        KvBlock source = kv_block(pool, from / KEYS, blockIdx.x),
                target = kv_block(pool, to / KEYS, blockIdx.x);
        for (uint i = threadIdx.x; i < pool.digits * dims; i += blockDim.x) {
            uint digit = i / dims, dim = i % dims;
            target.codes[key_at(plane, digit, to % KEYS, dim)] =
                source.codes[key_at(plane, digit, from % KEYS, dim)];
            target.codes[value_at(plane, pool.digits, digit, to % KEYS, dim)] =
                source.codes[value_at(plane, pool.digits, digit, from % KEYS, dim)];
        }
        for (uint group = threadIdx.x; group <= pool.groups; group += blockDim.x)
            target.scales[group * KEYS + to % KEYS] = source.scales[group * KEYS + from % KEYS];
        __syncthreads();
    }
}
