// kv_append of long windows: a block of threads fills the part of a page that one head's K or V has, in
// shared memory, and copies it out in whole lines. kv.cu would scatter the bytes of V. Bound by memory.
#include "kv.cuh"

#define WARPS 8

// Grid [pages of the longest window and one more, 2 K/V heads: K, then V, windows], 256 threads; shared
// memory as kv.rs says: the codes of one side, then its scales.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    kv_append_pages(StepTables step, KvPool pool, const float* k, const float* v) {
    extern __shared__ __align__(16) uchar memory[];
    wait_for_launches_before();
    const StepWindow window = step.windows[blockIdx.z];
    uint page = window.start / KEYS + blockIdx.x, place = page * KEYS, end = window.start + window.rows;
    if (place >= end) return;
    // Keys of the page that the window has.
    uint first = max(place, window.start) - place, last = min(place + KEYS, end) - place;
    bool is_value = blockIdx.y >= pool.kv_heads;
    uint head = blockIdx.y % pool.kv_heads, t = threadIdx.x, plane = plane_of(pool),
         bytes = pool.digits * plane;
    schar* codes = (schar*)memory;
    float* scales = (float*)(memory + bytes);
    // Where the shared copy of a whole block would begin.
    KvBlock staged{is_value ? codes - bytes : codes, is_value ? scales - pool.groups * KEYS : scales};
    for (uint key = first + t / 32; key < last; key += WARPS) {
        ulong row = window.first + place + key - window.start;
        float x[HEAD_VALUES];
        load_head(x, (is_value ? v : k) + (row * pool.kv_heads + head) * pool.head_dim, pool.head_dim);
        if (is_value)
            store_value(x, pool, staged, key);
        else
            store_key(x, pool, staged, key);
    }
    __syncthreads();
    KvBlock to = kv_block(pool, step.pages[window.pages_at + page], head);
    schar* out = to.codes + (is_value ? bytes : 0);
    float* out_scales = to.scales + (is_value ? pool.groups * KEYS : 0);
    for (uint i = t; i < (is_value ? 1 : pool.groups) * KEYS; i += 32 * WARPS)
        if (i % KEYS >= first && i % KEYS < last) out_scales[i] = scales[i];
    if (!is_value || last - first == KEYS) {
        // Lines of 16 bytes: of K, four for a key.
        for (uint i = t; i < bytes / 16; i += 32 * WARPS) {
            uint key = i / 4 % KEYS;
            if (is_value || (key >= first && key < last)) ((uint4*)out)[i] = ((const uint4*)codes)[i];
        }
        return;
    }
    for (uint i = t; i < bytes; i += 32 * WARPS) {
        uint key = i % KEYS;
        if (key >= first && key < last) {
            uint at = i / KEYS * KEYS + value_slot(key);
            out[at] = codes[at];
        }
    }
}
