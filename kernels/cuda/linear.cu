// linear, decode form: out = x W^T, several matrices over one input in one launch. Rows beyond ROWS go to
// further blocks of grid y.
//
// Compiled for ROWS (1, 8, 16, 32), WHOLE_SLICES (1: the form for more than 8 rows, or for mixed ways of
// storing), COLS, THREADS and TILES of a block, and the kinds of matrix that the launch mixes. Grid x:
// blocks of all matrices one after another. Block: `slices` warps a tile, several tiles (or 8 warps where
// there are more slices); a block of a dense matrix has 4 outputs a warp. With STREAM, for matrices of one
// kind and up to 8 rows, the grid is as many blocks as the card holds (BLOCKS a multiprocessor) and each
// takes every gridDim.x-th of them.
#include "linear_few.cuh"

#ifndef STREAM
#define STREAM 0
#define BLOCKS (THREADS <= 256 && !WHOLE_SLICES ? 2 : 1)
#endif

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
    uint blocks, unused;   // of all matrices
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

#if STREAM
// Places of scales, and of exact sums, that a block uses in turn.
#define PARAM_RING 3
#define EXACT_RING 2

// A block's tiles of one matrix.
struct StreamPlace {
    const Target* target;
    uint first_tile, last;
};

SHARED StreamPlace stream_place(const LinearArgs& args, uint block) {
    uint which = 0;
    while (which + 1 < args.count && block >= args.targets[which + 1].first_block) which++;
    const Target& target = args.targets[which];
    return StreamPlace{&target, (block - target.first_block) * TILES, (target.outputs + 15) / 16 - 1};
}

// A warp has one job of every place of its block. Weights are asked for two places ahead (the first ones
// before the launch before has ended), scales too; the rows stay in shared memory.
template <class S>
struct Stream {
    typedef Job<S, COLS> J;
    static const uint JOBS = J::JOBS, GROUPS = COLS / S::GROUP, SLICES = (COLS + 1023) / 1024;
    const LinearArgs& args;
    const Rows& rows;
    uchar* smem;
    uint warp, lane;

    SHARED void load(J& job, uint block) const {
        if (block >= args.blocks) return;
        StreamPlace place = stream_place(args, block);
        job.load_weights(place.target->weights, min(place.first_tile + warp / JOBS, place.last),
                         warp % JOBS * JOB_STEPS, lane);
    }

    // One group of copies, empty beyond the last block.
    SHARED void fetch(uint block, uint turn) const {
        if (block < args.blocks) {
            StreamPlace place = stream_place(args, block);
            for (uint tile = 0; tile < TILES; tile++)
                fetch_params<S, COLS>(params(turn, tile), place.target->weights,
                                      min(place.first_tile + tile, place.last));
        }
        copy_async_commit();
    }

    SHARED uchar* params(uint turn, uint tile) const {
        const FewPlaces& at = args.few_places;
        return smem + at.params_at + (turn % PARAM_RING * TILES + tile) * at.param_bytes;
    }

    SHARED float* exact(uint turn, uint tile) const {
        const FewPlaces& at = args.few_places;
        return (float*)(smem + at.exact_at + (turn % EXACT_RING * TILES + tile) * at.exact_bytes);
    }

    // A half warp has a slice: 16 outputs of a row and tile, slices added in order.
    SHARED void finish(uint block, uint turn) const {
        StreamPlace place = stream_place(args, block);
        const float* units = (const float*)(smem + args.few_places.units_at);
        uint output = lane % 16, half = lane / 16;
        const uint warps = THREADS / 32;
        for (uint i = (warp + turn) % warps; i < TILES * (ONE_ROW ? 1 : rows.count); i += warps) {
            uint tile = i % TILES, row = ONE_ROW ? 0 : i / TILES, o = (place.first_tile + tile) * 16 + output;
            float total = 0.0f;
#pragma unroll
            for (uint slice = 0; slice < SLICES; slice += 2) {
                float own = 0.0f;
                if (slice + half < SLICES)
                    own = scale_slice<S, COLS>(exact(turn, tile), params(turn, tile), units + row * GROUPS,
                                               units + (ROWS + row) * GROUPS, row, output, slice + half);
                float next = __shfl_down_sync(0xffffffffu, own, 16);
                total = total + own;
                if (slice + 1 < SLICES) total = total + next;
            }
            if (half == 0 && o < place.target->outputs)
                place.target->out[(ulong)rows.row(row) * place.target->outputs + o] = total;
        }
    }

    SHARED void turn(J& job, uint block, uint turn, const uchar* row) const {
        job.multiply_row(exact(turn, warp / JOBS), warp % JOBS * JOB_STEPS, lane, row);
        load(job, block + 2 * gridDim.x);
        // The scales of this turn are there; those of the next may be on their way.
        copy_async_wait<1>();
        __syncthreads();
        fetch(block + 2 * gridDim.x, turn + 2);
        finish(block, turn);
    }

    SHARED void run() const {
        const FewPlaces& at = args.few_places;
        J jobs[2];
        uint first = blockIdx.x;
        load(jobs[0], first);
        load(jobs[1], first + gridDim.x);
        fetch(first, 0);
        wait_for_launches_before();
        const InputCodes& in = args.codes[args.targets[0].form];
        stage_codes<COLS>(smem, at.row_stride, in, rows);
        stage_units<GROUPS>((float*)(smem + at.units_at), in, rows);
        copy_async_commit();
        fetch(first + gridDim.x, 1);
        copy_async_wait<1>();
        __syncthreads();
        const uchar* row = smem + (ONE_ROW ? 0 : min(lane / 4, rows.count - 1)) * at.row_stride;
        for (uint block = first, number = 0; block < args.blocks; block += 2 * gridDim.x, number += 2) {
            turn(jobs[0], block, number, row);
            if (block + gridDim.x < args.blocks) turn(jobs[1], block + gridDim.x, number + 1, row);
        }
    }
};
#endif

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
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint output = (block * warps + warp) * 4 + lane / 8;
    dense_output<DTYPE>(
        target.weights.params, output, target.outputs, args.x, args.cols, rows, lane,
        [&](uint n, float value) { target.out[(ulong)rows.row(n) * target.outputs + output] = value; });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear(const __grid_constant__ LinearArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    // The next launch asks for its weights as soon as there is room for it.
    start_next_launch();
#if STREAM
    Rows stream_rows = {nullptr, 1, blockIdx.y * ROWS, min(args.rows - blockIdx.y * ROWS, (uint)ROWS)};
    Stream<typename Kind<KIND0>::Stored>{args, stream_rows, smem, threadIdx.x / 32, threadIdx.x % 32}.run();
#else
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
#endif
}
