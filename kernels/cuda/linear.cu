// linear, decode form: out = x W^T, several matrices over one input in one launch. Rows beyond ROWS go to further
// blocks of grid y.
//
// Compiled for ROWS (1, 8, 16, 32) and the kinds of matrix that the launch mixes. Grid x: blocks of all matrices one
// after another. Block: `slices` warps a tile, several tiles (or 8 warps where there are more slices); a block of a
// dense matrix has 4 outputs a warp.
#include "linear_decode.cuh"

#define MATRICES_MAX 8

struct Target {
    Packed weights;
    float* out;  // [rows, outputs]
    uint outputs;
    uint kind;
    uint first_block;
    uint form;  // which of `codes` below it reads
};

struct LinearArgs {
    const float* x;  // [rows, cols], for dense matrices
    InputCodes codes[3];
    uint rows, cols, count, slices;
    Places places;
    Target targets[MATRICES_MAX];
};

template <class S>
SHARED void grouped_block(const LinearArgs& args, const Target& target, const Rows& rows, uint block, uchar* smem) {
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint slices = args.slices, at_once = min(slices, warps), tiles = warps / at_once;
    uint local = warp / at_once, tile = block * tiles + local;
    bool there = local < tiles && tile * 16 < target.outputs;
    uchar* mine = smem + warp * args.places.warp_bytes;
    if (there) fetch_slice<S>(mine, target.weights, tile, warp % at_once, args.cols, lane);
    wait_for_launches_before();
    start_next_launch();
    const InputCodes& in = args.codes[target.form];
    if (args.places.row_stride) stage_rows(smem, args.places, in, rows, args.cols);
    __syncthreads();
    float* sums = (float*)(smem + args.places.sums_at) + local * slices * ROWS * 16;
    for (uint slice = warp % at_once; there && slice < slices; slice += at_once) {
        if (slice >= at_once) {
            __syncwarp();
            fetch_slice<S>(mine, target.weights, tile, slice, args.cols, lane);
        }
        slice_block<S>(sums + slice * ROWS * 16, smem, args.places, in, rows, slice, args.cols, warp, lane);
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < tiles * 16 * rows.count; i += blockDim.x) {
        uint row = i / (tiles * 16), at = i % (tiles * 16), output = block * tiles * 16 + at;
        const float* parts = (float*)(smem + args.places.sums_at) + at / 16 * slices * ROWS * 16;
        if (output < target.outputs)
            target.out[(ulong)rows.row(row) * target.outputs + output] = add_slices(parts, slices, row, at % 16);
    }
}

template <int DTYPE>
SHARED void dense_block(const LinearArgs& args, const Target& target, const Rows& rows, uint block) {
    wait_for_launches_before();
    start_next_launch();
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint output = (block * warps + warp) * 4 + lane / 8;
    dense_output<DTYPE>(target.weights.params, output, target.outputs, args.x, args.cols, rows, lane,
                        [&](uint n, float value) { target.out[(ulong)rows.row(n) * target.outputs + output] = value; });
}

extern "C" __global__ void __launch_bounds__(256) linear(const __grid_constant__ LinearArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    uint which = 0;
    while (which + 1 < args.count && blockIdx.x >= args.targets[which + 1].first_block) which++;
    const Target& target = args.targets[which];
    uint block = blockIdx.x - target.first_block, first = blockIdx.y * ROWS;
    Rows rows = {nullptr, 1, first, min(args.rows - first, (uint)ROWS)};
    with_kind(target.kind, [&](auto kind) {
        typedef decltype(kind) K;
        if constexpr (K::DENSE) dense_block<K::DTYPE>(args, target, rows, block);
        else grouped_block<typename K::Stored>(args, target, rows, block, smem);
    });
}
