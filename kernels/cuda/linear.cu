// linear, decode form: out = x W^T, several matrices over one input in one launch. Rows beyond ROWS go to
// further blocks of grid y.
//
// Compiled for ROWS (1, 8, 16, 32), WHOLE_SLICES (1: the form for more than 8 rows, or for streaming), COLS,
// THREADS and TILES of a block, and the kinds of matrix that the launch mixes. Grid x: blocks of all matrices
// one after another. Block: `slices` warps a tile, several tiles (or 8 warps where there are more slices); a
// block of a dense matrix has 4 outputs a warp.
#include "linear_few.cuh"

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
    Places places;         // in whole slices
    FewPlaces few_places;  // else
    Target targets[MATRICES_MAX];
};

// Small jobs: 1 to 8 rows.
template <class S>
SHARED void few_block(const LinearArgs& args, const Target& target, const Rows& rows, uint block,
                      uchar* smem) {
    typedef Job<S, COLS> J;
    const uint jobs = J::JOBS, warps = THREADS / 32, slices = (COLS + 1023) / 1024, groups = COLS / S::GROUP;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const FewPlaces& at = args.few_places;
    uint last = (target.outputs + 15) / 16 - 1, first_tile = block * TILES;
    J job;
    // Tiles beyond the last one repeat it.
    if (warp < TILES * jobs)
        job.load_weights(target.weights, min(first_tile + warp / jobs, last), warp % jobs * JOB_STEPS, lane);
    for (uint tile = 0; tile < TILES; tile++)
        fetch_params<S, COLS>(smem + at.params_at + tile * at.param_bytes, target.weights,
                              min(first_tile + tile, last));
    copy_async_commit();
    wait_for_launches_before();
    start_next_launch();
    const InputCodes& in = args.codes[target.form];
    const uchar* row = in.codes + (ulong)rows.row(ONE_ROW ? 0 : min(lane / 4, rows.count - 1)) * COLS * 2;
    float* units = (float*)(smem + at.units_at);
    float* exact = (float*)(smem + at.exact_at);
    if (warp < TILES * jobs) job.load_row(row, warp % jobs * JOB_STEPS, lane);
    stage_units<groups>(units, in, rows);
    copy_async_commit();
    for (uint i = warp; i < TILES * jobs; i += warps) {
        uint tile = i / jobs, first = i % jobs * JOB_STEPS;
        if (i >= warps) {
            job.load_weights(target.weights, min(first_tile + tile, last), first, lane);
            job.load_row(row, first, lane);
        }
        job.multiply(exact + tile * at.exact_bytes / 4, first, lane);
    }
    copy_async_wait<0>();
    __syncthreads();
    float* parts = (float*)(smem + at.sums_at);
    for_outputs<TILES, slices>(rows.count, [&](uint tile, uint slice, uint r, uint output) {
        float sum = scale_slice<S, COLS>(exact + tile * at.exact_bytes / 4,
                                         smem + at.params_at + tile * at.param_bytes, units + r * groups,
                                         units + (ROWS + r) * groups, r, output, slice);
        parts[((tile * slices + slice) * ROWS + r) * 16 + output] = sum;
    });
    __syncthreads();
    for_outputs<TILES, 1>(rows.count, [&](uint tile, uint, uint r, uint o) {
        uint output = (first_tile + tile) * 16 + o;
        if (output < target.outputs)
            target.out[(ulong)rows.row(r) * target.outputs + output] =
                add_slices(parts + tile * slices * ROWS * 16, slices, r, o);
    });
}

// Whole slices.
template <class S>
SHARED void grouped_block(const LinearArgs& args, const Target& target, const Rows& rows, uint block,
                          uchar* smem) {
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
            target.out[(ulong)rows.row(row) * target.outputs + output] =
                add_slices(parts, slices, row, at % 16);
    }
}

template <int DTYPE>
SHARED void dense_block(const LinearArgs& args, const Target& target, const Rows& rows, uint block) {
    wait_for_launches_before();
    start_next_launch();
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint output = (block * warps + warp) * 4 + lane / 8;
    dense_output<DTYPE>(
        target.weights.params, output, target.outputs, args.x, args.cols, rows, lane,
        [&](uint n, float value) { target.out[(ulong)rows.row(n) * target.outputs + output] = value; });
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS <= 256 && !WHOLE_SLICES ? 2 : 1)
    linear(const __grid_constant__ LinearArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    uint which = 0;
    while (which + 1 < args.count && blockIdx.x >= args.targets[which + 1].first_block) which++;
    const Target& target = args.targets[which];
    uint block = blockIdx.x - target.first_block, first = blockIdx.y * ROWS;
    Rows rows = {nullptr, 1, first, min(args.rows - first, (uint)ROWS)};
    with_kind(target.kind, [&](auto kind) {
        typedef decltype(kind) K;
        if constexpr (K::DENSE)
            dense_block<K::DTYPE>(args, target, rows, block);
        else if constexpr (!WHOLE_SLICES)
            few_block<typename K::Stored>(args, target, rows, block, smem);
        else
            grouped_block<typename K::Stored>(args, target, rows, block, smem);
    });
}
