// Routed experts of many rows: which pairs each expert has. See experts.cu and experts_prompt.cu.
#include "common.cuh"

// Exclusive sums of `own` over the threads of a block, and the sum of all. All threads; `warp_sums`: 32
// words.
SHARED uint sums_before(uint own, uint* warp_sums, uint& all) {
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, up_to = own;
    for (uint h = 1; h < 32; h <<= 1) {
        uint other = __shfl_up_sync(0xffffffffu, up_to, h);
        if (lane >= h) up_to += other;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = up_to;
    __syncthreads();
    uint before = up_to - own;
    all = 0;
    for (uint w = 0; w < blockDim.x / 32; w++) {
        if (w < warp) before += warp_sums[w];
        all += warp_sums[w];
    }
    return before;
}

// f(pair, its expert) for every pair, by all threads of the block; eight loads of a thread in flight.
template <class F>
SHARED void each_pair(const uint* ids, uint pairs, F f) {
    for (uint first = threadIdx.x; first < pairs; first += 8 * blockDim.x) {
        uint expert[8];
#pragma unroll
        for (uint i = 0; i < 8; i++) expert[i] = ids[min(first + i * blockDim.x, pairs - 1)];
#pragma unroll
        for (uint i = 0; i < 8; i++)
            if (first + i * blockDim.x < pairs) f(first + i * blockDim.x, expert[i]);
    }
}

// Lists the pairs by expert: starts and order; and tiles of at most tile_rows pairs of one expert: count, 0,
// then (expert, first place in `order`); none of them `taken`. One block; dynamic shared memory: experts
// words.
extern "C" __global__ void __launch_bounds__(1024)
    experts_sort(const uint* ids, uint* starts, uint* order, uint* tiles, uint* taken, uint pairs,
                 uint experts, uint tile_rows) {
    extern __shared__ uint counts[];
    __shared__ uint warp_sums[32];
    wait_for_launches_before();
    start_next_launch();
    for (uint e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    each_pair(ids, pairs, [&](uint, uint expert) { atomicAdd(&counts[expert], 1u); });
    __syncthreads();
    uint places = 0, listed = 0;
    for (uint first = 0; first < experts; first += blockDim.x) {
        uint e = first + threadIdx.x, own = e < experts ? counts[e] : 0, all;
        uint start = places + sums_before(own, warp_sums, all);
        places += all;
        if (e < experts) starts[e] = start, counts[e] = start;
        uint own_tiles = (own + tile_rows - 1) / tile_rows;
        uint tile = listed + sums_before(own_tiles, warp_sums, all);
        listed += all;
        for (uint i = 0; i < own_tiles; i++)
            tiles[2 + 2 * (tile + i)] = e, tiles[3 + 2 * (tile + i)] = start + i * tile_rows;
    }
    if (threadIdx.x == 0) starts[experts] = pairs, tiles[0] = listed, taken[0] = 0, taken[1] = 0;
    __syncthreads();
    // The order inside an expert does not matter: each pair is computed on its own.
    each_pair(ids, pairs, [&](uint pair, uint expert) { order[atomicAdd(&counts[expert], 1u)] = pair; });
}
