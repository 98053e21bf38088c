// Keys and values of long chains as halves, in the order in which products read them: attention_warpgroup
// brings them by the copy engine where many blocks of threads read the same ones.
#include "attention_room.cuh"

// Grid [blocks of 64 keys, K/V heads, windows], 128 threads, room for a Stage.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    attention_halves(StepTables step, KvPool pool, Halves halves) {
    extern __shared__ __align__(1024) uchar memory[];
    Stage& stage = *(Stage*)memory;
    wait_for_launches_before();
    const StepWindow window = step.windows[blockIdx.z];
    const uint block = blockIdx.x, thread = threadIdx.x;
    if (is_small(window) || block * KEYS >= window.start + window.rows) return;
    const KvBlock from = kv_block(pool, page_of(step, window, block * KEYS), blockIdx.y);
    uint4 keys[PIECES], values[PIECES];
    load_pieces(keys, from.codes);
    load_pieces(values, from.codes + PLANE);
    store_keys(stage.keys, keys);
    store_values(stage.values, values);
    HalfBlock& to = halves.of_head(pool, blockIdx.z, blockIdx.y)[block];
    for (uint i = thread; i < (GROUPS + 1) * KEYS; i += GROUP_THREADS)
        to.scales[i / KEYS * SCALES + scale_at(i % KEYS)] = from.scales[i];
    __syncthreads();
    for (uint i = thread; i < sizeof(Stage) / 16; i += GROUP_THREADS)
        ((uint4*)&to.stage)[i] = ((const uint4*)&stage)[i];
}
