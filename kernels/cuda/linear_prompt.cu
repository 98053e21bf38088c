// linear, prompt form: out = x W^T for many rows, several grouped matrices over one input in one launch.
// Compiled for one kind of matrix, TILE_ROWS, ROW_WARPS and BLOCKS that share a processor. Grid x: blocks of
// 128 outputs of all matrices, taken in turn; y: tiles of rows. See linear_prompt.cuh.
#include "linear_prompt.cuh"

#define MATRICES_MAX 8

struct PromptTarget {
    Packed weights;
    float* out;
    uint outputs;
    uint first_block;
};

struct PromptArgs {
    const uchar* codes;
    const float* units;
    const float* sums;
    uint rows, cols, count, blocks;
    const uint* wide;  // of a repair: only tiles with a row that is marked here (align.cu); else none
    PromptTarget targets[MATRICES_MAX];
};

typedef Kind<KIND0>::Stored Stored;

extern "C" __global__ void __launch_bounds__(TILE_THREADS, BLOCKS)
    linear_prompt(const __grid_constant__ PromptArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    wait_for_launches_before();
    start_next_launch();
    uint first = blockIdx.y * TileShape<Stored>::ROWS,
         count = min(args.rows - first, (uint)TileShape<Stored>::ROWS);
    TileRows in = {args.codes, args.units, args.sums, nullptr, 1, first, count, args.cols};
    if (args.wide && !any_marked(args.wide, in)) return;
    for (uint block = blockIdx.x; block < args.blocks; block += gridDim.x) {
        uint which = 0;
        while (which + 1 < args.count && block >= args.targets[which + 1].first_block) which++;
        const PromptTarget& target = args.targets[which];
        multiply_tile<Stored>(smem, target.weights, in, target.outputs, (block - target.first_block) * 8,
                              [&](uint n) { return target.out + (ulong)(first + n) * target.outputs; });
        __syncthreads();
    }
}
