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

struct Lists {
    uint* starts;  // [experts + 1] into `order`
    uint* order;   // pairs by expert
    uint* tiles;   // count, 0, then (expert, first place in `order`) of tiles of at most tile_rows pairs
    uint* taken;   // two counts of tiles that products have taken, none so far
    uint pairs, experts, tile_rows;
};

// What a block knows of an expert: its pairs, and those of them that belong to blocks before this one.
struct Counted {
    uint all, before;
};

// `counts` becomes where the block's first pair of each expert goes; one block lists starts and tiles. All
// threads.
template <class F>
SHARED void list_experts(const Lists& to, uint* counts, bool lists, F counted) {
    __shared__ uint warp_sums[32];
    uint places = 0, listed = 0;
    for (uint first = 0; first < to.experts; first += blockDim.x) {
        uint e = first + threadIdx.x, all;
        Counted own = e < to.experts ? counted(e) : Counted{0, 0};
        uint start = places + sums_before(own.all, warp_sums, all);
        places += all;
        if (e < to.experts) counts[e] = start + own.before;
        if (!lists) continue;
        uint own_tiles = (own.all + to.tile_rows - 1) / to.tile_rows;
        uint tile = listed + sums_before(own_tiles, warp_sums, all);
        listed += all;
        if (e < to.experts) to.starts[e] = start;
        for (uint i = 0; i < own_tiles; i++)
            to.tiles[2 + 2 * (tile + i)] = e, to.tiles[3 + 2 * (tile + i)] = start + i * to.tile_rows;
    }
    if (lists && threadIdx.x == 0) {
        to.starts[to.experts] = to.pairs, to.tiles[0] = listed;
        to.taken[0] = to.taken[1] = 0;
    }
    __syncthreads();
}

// Pairs of each expert among first .. first + count - 1, into shared memory. All threads.
SHARED void count_pairs(const uint* ids, uint count, uint experts, uint* counts) {
    for (uint e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    each_pair(ids, count, [&](uint, uint expert) { atomicAdd(&counts[expert], 1u); });
    __syncthreads();
}

// One block; dynamic shared memory: experts words.
extern "C" __global__ void __launch_bounds__(1024) experts_sort(const uint* ids, Lists to) {
    extern __shared__ uint counts[];
    wait_for_launches_before();
    start_next_launch();
    count_pairs(ids, to.pairs, to.experts, counts);
    list_experts(to, counts, true, [&](uint e) { return Counted{counts[e], 0}; });
    // The order inside an expert does not matter: each pair is computed on its own.
    each_pair(ids, to.pairs,
              [&](uint pair, uint expert) { to.order[atomicAdd(&counts[expert], 1u)] = pair; });
}

// Many pairs, in two launches of the same grid: blocks count `share` pairs each, then put them.
extern "C" __global__ void __launch_bounds__(256)
    experts_count(const uint* ids, uint* counted, uint pairs, uint experts, uint share) {
    extern __shared__ uint counts[];
    wait_for_launches_before();
    start_next_launch();
    uint first = blockIdx.x * share;
    count_pairs(ids + first, min(pairs - first, share), experts, counts);
    for (uint e = threadIdx.x; e < experts; e += blockDim.x) counted[blockIdx.x * experts + e] = counts[e];
}

extern "C" __global__ void __launch_bounds__(256)
    experts_place(const uint* ids, const uint* counted, Lists to, uint share) {
    extern __shared__ uint counts[];
    wait_for_launches_before();
    start_next_launch();
    list_experts(to, counts, blockIdx.x == 0, [&](uint e) {
        Counted own = {0, 0};
#pragma unroll 16
        for (uint block = 0; block < gridDim.x; block++) {
            uint more = counted[block * to.experts + e];
            own.all += more;
            if (block < blockIdx.x) own.before += more;
        }
        return own;
    });
    uint first = blockIdx.x * share;
    each_pair(ids + first, min(to.pairs - first, share),
              [&](uint pair, uint expert) { to.order[atomicAdd(&counts[expert], 1u)] = first + pair; });
}
