// linear, prompt form of Hopper: out = x W^T for many rows, several grouped matrices of one kind over one
// input in one launch. Compiled for the kind and STAGES. Grid: as many blocks as share the card's
// processors; each takes tiles in turn, those of one block of outputs one after another. See
// linear_warpgroup.cuh.
#include "linear_warpgroup.cuh"

#define MATRICES_MAX 8

struct WarpgroupTarget {
    Packed weights;
    float* out;
    uint outputs;
    uint first_block;
};

struct WarpgroupArgs {
    AlignedRows in;
    uint rows, cols, count, tile_rows;
    uint blocks, unused;
    WarpgroupTarget targets[MATRICES_MAX];
};

struct LinearTiles {
    typedef Kind<KIND0>::Stored Stored;
    static const bool GATHERED = false;
    const WarpgroupArgs& args;

    SHARED uint cols() const { return args.cols; }
    SHARED uint row_tiles() const { return (args.rows + args.tile_rows - 1) / args.tile_rows; }
    SHARED uint count() const { return args.blocks * row_tiles(); }
    SHARED uint after(uint n) const { return n + gridDim.x; }
    SHARED const WarpgroupTarget& target(uint n) const {
        uint block = n / row_tiles(), which = 0;
        while (which + 1 < args.count && block >= args.targets[which + 1].first_block) which++;
        return args.targets[which];
    }
    SHARED RingTile tile(uint n) const {
        const WarpgroupTarget& to = target(n);
        uint first = n % row_tiles() * args.tile_rows, count = min(args.rows - first, args.tile_rows);
        uint block = n / row_tiles() - to.first_block;
        float* out = to.out + (ulong)first * to.outputs;
        return RingTile{to.weights, args.in,   nullptr,   1,          first,
                        count,      args.cols, block * 8, to.outputs, out};
    }
};

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)
    linear_warpgroup(const __grid_constant__ WarpgroupArgs args) {
    extern __shared__ __align__(1024) uchar smem[];
    wait_for_launches_before();
    start_next_launch();
    run_ring(smem, LinearTiles{args});
}
