// Routed experts: out[pair] = down(silu(gate x) * up x) for each (row, pick) pair, docs/arithmetic.md, expert output.
//
// Each expert's weights are read once for all pairs that chose it, ROWS pairs at a time. Three kernels: `experts_sort`
// (many rows only) lists the pairs by expert; `experts_hidden` computes silu(gate x) * up x; `experts_down`
// quantizes it in its prologue and multiplies by down. Grid x: blocks of outputs; y: pairs, of which the first that
// names an expert does all of that expert's; or, with a list, experts.
// Compiled for ROWS (1, 8) and the kinds of matrix of the layer.
#include "linear_decode.cuh"

struct ExpertMatrix {
    Packed weights;
    uint kind;
    uint form;  // gate and up: which of `codes` it reads
};

struct ExpertArgs {
    const ExpertMatrix* matrices;  // [gate, up, down][experts]
    const uint* ids;               // [pairs]
    uint* starts;                  // [experts + 1] into `order`
    uint* order;                   // pairs by expert
    const float* x;                // [rows, width]
    float* hidden;                 // [pairs, inner]
    float* out;                    // [pairs, width]
    InputCodes codes[3];           // of x
    uint pairs, k, experts, width, inner;
    uint slices;     // of the kernel's own input
    uint listed;     // 1: starts and order are there
    uint raw_at;     // down: units and sums of the block's rows
    uint chunk;      // pairs at a time, at most ROWS
    uint tiles;      // of a block
    Places places;
};

// The pairs of a block: `list` of `count`, all of one expert. False: nothing to do.
struct Share {
    const uint* list;
    uint count, expert;
};

// Finds the block's pairs. `buffer`: `pairs` words of shared memory, for the form without a list.
SHARED bool find_share(Share& share, const ExpertArgs& args, uint* buffer) {
    if (args.listed) {
        share.expert = blockIdx.y;
        uint start = args.starts[share.expert];
        share.list = args.order + start;
        share.count = args.starts[share.expert + 1] - start;
        return share.count > 0;
    }
    share.expert = args.ids[blockIdx.y];
    share.list = buffer;
    uint lane = threadIdx.x % 32, count = 0;
    for (uint first = 0; first < args.pairs; first += 32) {
        uint pair = first + lane;
        bool mine = pair < args.pairs && args.ids[pair] == share.expert;
        uint found = __ballot_sync(0xffffffffu, mine);
        // An earlier pair's block does this expert.
        if (count == 0 && found != 0 && first + __ffs(found) - 1 < blockIdx.y) return false;
        if (mine && threadIdx.x < 32) buffer[count + __popc(found & ((1u << lane) - 1))] = pair;
        count += __popc(found);
    }
    share.count = count;
    return true;
}

#define SHARE_MAX 256

extern "C" __global__ void __launch_bounds__(512) experts_hidden(const __grid_constant__ ExpertArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    __shared__ uint buffer[SHARE_MAX];
    wait_for_launches_before();
    start_next_launch();
    Share share;
    if (!find_share(share, args, buffer)) return;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 64;
    uint slices = args.slices, at_once = min(slices, warps), tiles = args.tiles;
    uint which = warp % 2, own = warp / 2, local = own / at_once, tile = blockIdx.x * tiles + local;
    const ExpertMatrix& gate = args.matrices[share.expert];
    const ExpertMatrix& up = args.matrices[args.experts + share.expert];
    const ExpertMatrix& matrix = which ? up : gate;
    bool there = local < tiles && tile * 16 < args.inner;
    uchar* mine = smem + warp * args.places.warp_bytes;
    float* sums = (float*)(smem + args.places.sums_at);
    uint part = slices * ROWS * 16;
    bool dense[2];
    with_kind(gate.kind, [&](auto kind) { dense[0] = decltype(kind)::DENSE; });
    with_kind(up.kind, [&](auto kind) { dense[1] = decltype(kind)::DENSE; });
    with_kind(matrix.kind, [&](auto kind) {
        typedef decltype(kind) K;
        if constexpr (!K::DENSE)
            if (there) fetch_slice<typename K::Stored>(mine, matrix.weights, tile, own % at_once, args.width, lane);
    });
    Places places = args.places;
    if (gate.form != up.form || dense[0] || dense[1]) places.row_stride = 0;
    for (uint first = 0; first < share.count; first += args.chunk) {
        __syncthreads();
        Rows rows = {share.list + first, args.k, 0, min(share.count - first, args.chunk)};
        if (places.row_stride) stage_rows(smem, places, args.codes[gate.form], rows, args.width);
        __syncthreads();
        with_kind(matrix.kind, [&](auto kind) {
            typedef decltype(kind) K;
            if constexpr (K::DENSE) {
                for (uint four = own; four < tiles * 4; four += warps) {
                    uint at = four * 4 + lane / 8, output = blockIdx.x * tiles * 16 + at;
                    float* to = sums + (at / 16 * 2 + which) * part + at % 16;
                    dense_output<K::DTYPE>(matrix.weights.params, output, args.inner, args.x, args.width, rows, lane,
                                           [&](uint n, float value) { to[n * 16] = value; });
                }
            } else {
                for (uint slice = own % at_once; there && slice < slices; slice += at_once) {
                    if (slice >= at_once || (first > 0 && slices > at_once)) {
                        __syncwarp();
                        fetch_slice<typename K::Stored>(mine, matrix.weights, tile, slice, args.width, lane);
                    }
                    slice_block<typename K::Stored>(sums + (local * 2 + which) * part + slice * ROWS * 16, smem, places,
                                                    args.codes[matrix.form], rows, slice, args.width, warp, lane);
                }
            }
        });
        __syncthreads();
        for (uint i = threadIdx.x; i < tiles * 16 * rows.count; i += blockDim.x) {
            uint row = i / (tiles * 16), at = i % (tiles * 16), output = blockIdx.x * tiles * 16 + at;
            const float* parts = sums + at / 16 * 2 * part;
            if (output >= args.inner) continue;
            float g = dense[0] ? parts[row * 16 + at % 16] : add_slices(parts, slices, row, at % 16);
            float u = dense[1] ? parts[part + row * 16 + at % 16] : add_slices(parts + part, slices, row, at % 16);
            args.hidden[(ulong)rows.index[row] * args.inner + output] = silu_exact(g) * u;
        }
    }
}

// Quantizes the hidden values of the block's rows in groups of GROUP: codes where staged rows lie, units and sums
// [row][group] at raw_at. By all threads; visible after a barrier.
template <int GROUP>
SHARED void quantize_hidden(uchar* smem, const ExpertArgs& args, const Places& places, const Rows& rows) {
    uint groups = args.inner / GROUP, quads = args.inner / 4;
    float* units = (float*)(smem + args.raw_at);
    float* code_sums = units + ROWS * groups;
    for (uint i = threadIdx.x; i < (rows.count * quads + 31) / 32 * 32; i += blockDim.x) {
        uint row = min(i / quads, rows.count - 1), quad = i % quads;
        float4 x = *(const float4*)(args.hidden + (ulong)rows.index[row] * args.inner + 4 * quad);
        float values[4] = {x.x, x.y, x.z, x.w};
        uint magnitude = 0;
        for (int j = 0; j < 4; j++) magnitude = max(magnitude, BITS(values[j]) & 0x7fffffffu);
        for (uint h = GROUP / 8; h > 0; h >>= 1)
            magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, h));
        float factor = quantize_factor(14, magnitude), sum = 0.0f;
        for (int j = 0; j < 4; j++) {
            values[j] = quantize_code(values[j], factor);
            sum = sum + values[j];
        }
        for (uint h = GROUP / 8; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
        if (i >= rows.count * quads) continue;
        uint2 pairs = make_uint2(half_pair(values[0], values[1]), half_pair(values[2], values[3]));
        *(uint2*)(smem + places.rows_at + row * places.row_stride + 8 * quad) = pairs;
        if (quad % (GROUP / 4) == 0) {
            units[row * groups + quad / (GROUP / 4)] = quantize_unit(14, magnitude);
            code_sums[row * groups + quad / (GROUP / 4)] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) experts_down(const __grid_constant__ ExpertArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    __shared__ uint buffer[SHARE_MAX];
    // The picks were there before experts_hidden began, and it lets this launch begin only after that.
    Share share;
    bool any = find_share(share, args, buffer);
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint slices = args.slices, at_once = min(slices, warps), tiles = args.tiles;
    uint local = warp / at_once, tile = blockIdx.x * tiles + local;
    const ExpertMatrix& matrix = args.matrices[2 * args.experts + (any ? share.expert : 0)];
    bool there = local < tiles && tile * 16 < args.width;
    uchar* mine = smem + warp * args.places.warp_bytes;
    if (any)
        with_kind(matrix.kind, [&](auto kind) {
            typedef decltype(kind) K;
            if constexpr (!K::DENSE)
                if (there) fetch_slice<typename K::Stored>(mine, matrix.weights, tile, warp % at_once, args.inner, lane);
        });
    wait_for_launches_before();
    start_next_launch();
    if (!any) return;
    float* sums = (float*)(smem + args.places.sums_at) + local * slices * ROWS * 16;
    for (uint first = 0; first < share.count; first += args.chunk) {
        __syncthreads();
        Rows pairs = {share.list + first, 1, 0, min(share.count - first, args.chunk)};
        with_kind(matrix.kind, [&](auto kind) {
            typedef decltype(kind) K;
            if constexpr (K::DENSE) {
                for (uint four = warp; four < tiles * 4; four += warps) {
                    uint output = blockIdx.x * tiles * 16 + four * 4 + lane / 8;
                    dense_output<K::DTYPE>(
                        matrix.weights.params, output, args.width, args.hidden, args.inner, pairs, lane,
                        [&](uint n, float value) { args.out[(ulong)pairs.index[n] * args.width + output] = value; });
                }
            } else {
                typedef typename K::Stored S;
                quantize_hidden<S::GROUP>(smem, args, args.places, pairs);
                __syncthreads();
                const float* units = (const float*)(smem + args.raw_at);
                InputCodes in = {nullptr, units, units + ROWS * (args.inner / S::GROUP)};
                Rows rows = {nullptr, 1, 0, pairs.count};
                for (uint slice = warp % at_once; there && slice < slices; slice += at_once) {
                    if (slice >= at_once || (first > 0 && slices > at_once)) {
                        __syncwarp();
                        fetch_slice<S>(mine, matrix.weights, tile, slice, args.inner, lane);
                    }
                    slice_block<S>(sums + slice * ROWS * 16, smem, args.places, in, rows, slice, args.inner, warp, lane);
                }
                __syncthreads();
                for (uint i = threadIdx.x; i < tiles * 16 * rows.count; i += blockDim.x) {
                    uint row = i / (tiles * 16), at = i % (tiles * 16), output = blockIdx.x * tiles * 16 + at;
                    const float* parts = (float*)(smem + args.places.sums_at) + at / 16 * slices * ROWS * 16;
                    if (output < args.width)
                        args.out[(ulong)pairs.index[row] * args.width + output] = add_slices(parts, slices, row, at % 16);
                }
            }
        });
    }
}

// Exclusive sums of `own` over the threads of a block, and the sum of all. All threads; `warp_sums`: 32 words.
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

// Lists the pairs by expert: starts and order; and tiles of at most tile_rows pairs of one expert: count, 0, then
// (expert, first place in `order`). One block; dynamic shared memory: experts words.
extern "C" __global__ void __launch_bounds__(1024)
experts_sort(const uint* ids, uint* starts, uint* order, uint* tiles, uint pairs, uint experts, uint tile_rows) {
    extern __shared__ uint counts[];
    __shared__ uint warp_sums[32];
    wait_for_launches_before();
    start_next_launch();
    for (uint e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (uint pair = threadIdx.x; pair < pairs; pair += blockDim.x) atomicAdd(&counts[ids[pair]], 1u);
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
    if (threadIdx.x == 0) starts[experts] = pairs, tiles[0] = listed;
    __syncthreads();
    // The order inside an expert does not matter: each pair is computed on its own.
    for (uint pair = threadIdx.x; pair < pairs; pair += blockDim.x) order[atomicAdd(&counts[ids[pair]], 1u)] = pair;
}
